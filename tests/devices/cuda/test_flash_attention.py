"""The optional flash-attn backend, with a stand-in for the package, which needs a GPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.attention.backend import DecodeRows, GraphedAttention
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cuda.flash_attention import FlashAttention, FlashDecode, FlashMixed
from nanovllm.errors import ConfigError
from nanovllm.ops.torch_ops import TorchOps
from tests.attention.cases import MIXES, Backend, check_last_tokens, make_case
from tests.devices import cpu_device
from tests.devices.cuda import stand_in_flash

pytest.importorskip("triton")
from nanovllm.devices.cuda.device import CudaDevice

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in_flash)
    attention = create("flash_attn")
    assert isinstance(attention, FlashAttention)
    return attention


def create(
    name: str,
    on_cpu: bool = False,
    block_size: int = 256,
    dtype: torch.dtype = torch.bfloat16,
) -> object:
    """Create an attention backend as a device does, without a CUDA device."""
    device: Any = cpu_device(attention_backend=name, kvcache_block_size=block_size)
    return (CpuDevice if on_cpu else CudaDevice).attention(device, dtype, TorchOps())


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, None), (None, 0.5)])
def test_equals_the_reference(
    flash: FlashAttention, mix: str, window: int | None, softcap: float | None
) -> None:
    case = make_case(MIXES[mix], block_size=256, window=window, scale=0.17, softcap=softcap)
    is_decode = all(count == 1 for _, count in MIXES[mix])
    plan = flash.plan(case.rows)
    assert isinstance(plan, FlashDecode if is_decode else FlashMixed)
    output = case.run(Backend(TorchOps(), flash))
    assert output.shape == case.queries().shape
    torch.testing.assert_close(output.double(), case.reference(), rtol=2e-5, atol=2e-5)


def test_sinks_are_refused(flash: FlashAttention) -> None:
    case = make_case(MIXES["one decode"], block_size=256, has_sinks=True)
    with pytest.raises(ConfigError, match="attention sinks"):
        case.run(Backend(TorchOps(), flash))


def test_last_tokens(flash: FlashAttention) -> None:
    check_last_tokens(flash, MIXES["everything"], TorchOps())


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 4, 2]], ids=["decode", "mixed"])
def test_rows_are_lines_of_the_table_by_slot(flash: FlashAttention, counts: list[int]) -> None:
    case = make_case(list(zip([300, 0, 70], counts, strict=True)), block_size=256)
    want = case.run(Backend(TorchOps(), flash))
    table = torch.full((7, *case.rows.block_tables.shape[1:]), 10**6, dtype=torch.int32)
    slots = np.array([5, 0, 3], np.int32)
    table[slots] = case.rows.block_tables
    rows = type(case.rows)(slots, case.rows.starts, case.rows.counts, table)
    output = flash.attend(case.queries(), case.cache, flash.plan(rows), case.spec)
    torch.testing.assert_close(output, want)


def test_the_plan_of_a_graph_equals_that_of_a_step(flash: FlashAttention) -> None:
    """A graph uses the longest possible context, and pads with rows of length 0."""
    case = make_case([(300, 1), (2, 1), (0, 1)], block_size=256)
    want = case.run(Backend(TorchOps(), flash))
    slots = torch.arange(3, dtype=torch.int32)
    context_lens = torch.tensor([301, 3, 0], dtype=torch.int32)
    rows = DecodeRows(case.rows.block_tables, slots, context_lens, slots)
    plan = flash.decode_plan(rows)
    output = flash.attend(case.queries(), case.cache, plan, case.spec)
    torch.testing.assert_close(output[:2], want[:2])
    assert not output[2].any()


def test_graphs_are_for_backends_that_plan_on_the_device(flash: FlashAttention) -> None:
    assert isinstance(flash, GraphedAttention)
    assert not isinstance(SdpaAttention(16), GraphedAttention)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "dtype='bfloat16'"),
        ({"block_size": 32}, "kvcache_block_size=256"),
        ({"block_size": 128}, "multiple of 256, got 128"),
        ({"on_cpu": True}, "needs a CUDA device, but the engine runs on the cpu"),
    ],
)
def test_what_flash_attn_cannot_serve(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create("flash_attn", **options)  # type: ignore[arg-type]


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError, match="pip install flash-attn"):
        create("flash_attn")


def test_triton_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="attention_backend='triton' needs a CUDA device"):
        create("triton", on_cpu=True)


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "cuda"])
def test_sdpa_runs_anywhere(on_cpu: bool) -> None:
    assert isinstance(create("sdpa", on_cpu, 16, torch.float32), SdpaAttention)
