"""The compiled CPU kernels for experts equal the reference, and can be captured."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

pytest.importorskip("numba")

from nanovllm.devices.cpu import numba_experts as mixture
from nanovllm.devices.cpu.features import find_cpu_features
from nanovllm.devices.cpu.ops import NumbaOps
from nanovllm.devices.cpu.program import Launcher
from nanovllm.ops.torch_ops import TorchOps
from tests.ops.expert_layers import LAYERS, Layer

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def ops_of(dtype: torch.dtype, num_threads: int) -> NumbaOps:
    """Create ops; the launcher uses torch's current number of threads."""
    assert torch.get_num_threads() == num_threads
    ops = NumbaOps(Launcher(dtype), find_cpu_features())
    ops.max_expert_rows = 1000  # always use the kernels
    return ops


def make_ops(dtype: torch.dtype) -> NumbaOps:
    return ops_of(dtype, torch.get_num_threads())


@pytest.mark.usefixtures("num_threads")
@DTYPES
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_equals_the_reference(layer: Layer, dtype: torch.dtype) -> None:
    reference = TorchOps(find_cpu_features().matmul_dtype(dtype))
    x, logits = layer.inputs(dtype)
    before = x.clone(), logits.clone()
    got, want = (
        ops.pack_experts(*layer.weights(dtype), layer.routing)(x, logits)
        for ops in (make_ops(dtype), reference)
    )
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(x, before[0])
    assert torch.equal(logits, before[1])


@DTYPES
def test_takes_strided_inputs(dtype: torch.dtype) -> None:
    layer = Layer(5, 6, 2, 40, 24)
    experts = make_ops(dtype).pack_experts(*layer.weights(dtype), layer.routing)
    x, logits = layer.inputs(dtype)
    wide_x, wide_logits = torch.cat((x, x), dim=1), torch.cat((logits, logits), dim=1)
    assert torch.equal(experts(wide_x[:, :40], wide_logits[:, 6:]), experts(x, logits))


@DTYPES
def test_a_replay_chooses_anew(dtype: torch.dtype) -> None:
    """Routing is part of the capture: other inputs go to other experts."""
    ops = make_ops(dtype)
    layer = Layer(ops.max_linear_rows, 12, 3, 40, 24)
    experts = ops.pack_experts(*layer.weights(dtype), layer.routing)
    x, logits = layer.inputs(dtype)
    static = x.clone(), logits.clone()
    program, output = ops.launcher.capture(lambda: experts(*static))
    for shift in (0, 5, 0):
        static[0].copy_(x.roll(shift, dims=1))
        static[1].copy_(logits.roll(shift, dims=1))
        program.run()
        assert torch.equal(output, experts(*static))


@DTYPES
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_broken_token_changes_no_other(value: float, dtype: torch.dtype) -> None:
    layer = Layer(9, 6, 3, 40, 24)
    experts = make_ops(dtype).pack_experts(*layer.weights(dtype), layer.routing)
    x, logits = layer.inputs(dtype)
    want = experts(x, logits)
    for broken in (0, 4, 8):
        damaged, damaged_logits = x.clone(), logits.clone()
        damaged[broken], damaged_logits[broken] = value, value
        got = experts(damaged, damaged_logits)
        others = [token for token in range(9) if token != broken]
        assert torch.equal(got[others], want[others])
        assert not got[broken].isfinite().any()


@DTYPES
def test_many_tokens_are_left_to_the_library(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps small enough for capture never use the library, for any number of experts."""
    seen = []
    monkeypatch.setattr(mixture, "run_each_expert", lambda x, *_: seen.append(len(x)))
    for num_experts, top_k in ((2, 2), (64, 2)):
        layer = Layer(0, num_experts, top_k, 8, 8)
        ops = NumbaOps(Launcher(dtype), find_cpu_features())
        experts = ops.pack_experts(*layer.weights(dtype), layer.routing)
        for num_tokens in (1, ops.max_linear_rows, 5000):
            experts(
                torch.zeros(num_tokens, 8, dtype=dtype),
                torch.zeros(num_tokens, num_experts, dtype=dtype),
            )
    assert seen == [5000, 5000]
