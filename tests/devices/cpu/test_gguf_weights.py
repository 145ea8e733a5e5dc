"""Matmuls and embeddings with GGUF quant blocks equal those with the dequantized weights."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")
pytest.importorskip("gguf")

import gguf
import llvmlite.ir as ir

from nanovllm.checkpoint.gguf import BLOCK_TYPES
from nanovllm.devices.cpu import gguf_weights as panel_products
from nanovllm.devices.cpu.features import find_cpu_features
from nanovllm.devices.cpu.gguf_weights import to_panels
from nanovllm.devices.cpu.kernels import block_types
from nanovllm.devices.cpu.kernels.block_types import TYPES
from nanovllm.devices.cpu.ops import NumbaOps
from nanovllm.devices.cpu.program import Launcher
from nanovllm.ops.interface import Routing
from nanovllm.ops.quantized_weight import PanelWeight
from nanovllm.ops.torch_linear import PIECE_SIZE
from nanovllm.ops.torch_ops import TorchOps
from tests.checkpoint.test_gguf_types import random_blocks

pytestmark = pytest.mark.usefixtures("one_thread")
FAST = ("Q4_1",)  # tested by default; each type takes seconds to compile
KINDS = pytest.mark.parametrize(
    "kind", [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in TYPES]
)
NUM_IN = 512
NUM_ROWS = (0, 1, 2, 3, 4, 5, 9, 16, 17, 40)  # few (full tiles and remainders), and many
# Zeros, the smallest, the largest and the smallest normal float16.
EDGES = np.array([0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0, 6.104e-5, 1.0], np.float16)


@cache
def make_ops(dtype: torch.dtype, num_threads: int) -> NumbaOps:
    """Create ops; the launcher uses torch's current number of threads."""
    assert torch.get_num_threads() == num_threads
    return NumbaOps(Launcher(dtype), find_cpu_features())


def make_weight(kind: str, num_out: int, with_edges: bool = False) -> tuple[PanelWeight, Tensor]:
    """Return random panels, and their dequantized values."""
    quant = gguf.GGMLQuantizationType[kind]
    rows = random_blocks(quant, num_out, NUM_IN)
    if with_edges:
        blocks = rows.reshape(-1, TYPES[kind].num_bytes)
        at = 208 if kind == "Q6_K" else 0
        blocks[:, at : at + 2] = np.resize(EDGES, len(blocks)).view(np.uint8).reshape(-1, 2)
    values = torch.from_numpy(gguf.quants.dequantize(rows, quant))
    panels = to_panels(kind, torch.from_numpy(rows.reshape(num_out, -1)))
    return PanelWeight((panels,)), values


def make_experts(kind: str, count: int, num_out: int, num_in: int) -> tuple[PanelWeight, Tensor]:
    quant = gguf.GGMLQuantizationType[kind]
    rows = random_blocks(quant, count * num_out, num_in).reshape(count, num_out, -1)
    values = torch.from_numpy(gguf.quants.dequantize(rows, quant))
    return PanelWeight((to_panels(kind, torch.from_numpy(rows)),)), values


def make_x(num_rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn((num_rows, NUM_IN), generator=generator).to(dtype)


def test_every_type_that_is_read_is_there() -> None:
    assert set(TYPES) == set(BLOCK_TYPES)
    for name, kind in TYPES.items():
        size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert (kind.size, kind.num_bytes) == (size, num_bytes)


@KINDS
def test_rows_are_dequantized_to_the_last_bit(kind: str) -> None:
    """Rows come from every panel, also from an incomplete last one, in any order."""
    for with_edges in (False, True):
        table, values = make_weight(kind, 37, with_edges)
        ids = torch.randperm(37, generator=torch.Generator().manual_seed(1)).int()
        blocks = make_ops(torch.float32, 1).blocks
        assert torch.equal(blocks.embed(ids, table, 1.0), values[ids.long()])
        assert torch.equal(blocks.embed(ids, table, 3.0), 3.0 * values[ids.long()])


@KINDS
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_products_equal_those_of_dequantized_weights(kind: str, dtype: torch.dtype) -> None:
    blocks = make_ops(dtype, 1).blocks
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    for num_out in (1, 16, 70):
        weight, values = make_weight(kind, num_out)
        for bias in (None, torch.arange(num_out).to(dtype)):
            linear = blocks.linear(weight, bias)
            for num_rows in NUM_ROWS:
                x = make_x(num_rows, dtype)
                right = torch.nn.functional.linear(
                    x.double(), values.double(), None if bias is None else bias.double()
                )
                most = x.double().abs() @ values.double().abs().T  # errors are relative to this
                got = linear(x)
                assert (got.shape, got.dtype) == (right.shape, dtype)
                assert ((got - right).abs() <= rounding * (most + right.abs())).all(), num_rows


def test_logits_of_bfloat16_activations_are_float32() -> None:
    weight, values = make_weight("Q4_1", 70)
    lm_head = make_ops(torch.bfloat16, 1).pack_lm_head(weight, False)
    for num_rows in NUM_ROWS:
        x = make_x(num_rows, torch.bfloat16)
        got, right = lm_head(x), x.double() @ values.double().T
        assert got.dtype == torch.float32
        most = x.double().abs() @ values.double().abs().T
        assert ((got - right).abs() <= 1e-6 * (most + right.abs())).all(), num_rows


@pytest.mark.slow
@pytest.mark.parametrize("piece_size", [PIECE_SIZE, 1])  # all parts at once, or panel by panel
def test_parts_of_several_types_lie_one_below_another(
    piece_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel_products, "PIECE_SIZE", piece_size)
    blocks = make_ops(torch.float32, 1).blocks
    weights = [make_weight(kind, num_out) for kind, num_out in (("Q4_1", 33), ("Q6_K", 20))]
    parts, values = zip(*((weight.parts[0], values) for weight, values in weights), strict=True)
    bias = torch.arange(53.0)
    linear = blocks.linear(PanelWeight(parts), bias)
    for num_rows in (1, 5, 30):
        x = make_x(num_rows, torch.float32)
        right = torch.nn.functional.linear(x, torch.cat(values), bias)
        torch.testing.assert_close(linear(x), right, rtol=1e-4, atol=0.1)


@KINDS
def test_experts_equal_dequantized_ones(kind: str) -> None:
    """Compare experts with few tokens and with many."""
    ops, num_experts, size = make_ops(torch.float32, 1), 5, 256
    gate_up, gate_up_values = make_experts(kind, num_experts, 2 * size, NUM_IN)
    down, down_values = make_experts(kind, num_experts, NUM_IN, size)
    values = gate_up_values.double(), down_values.double()
    for top_k, num_tokens in ((1, 1), (2, 3), (5, 9), (2, 100)):
        routing = Routing(top_k, is_normalized=True)
        x, logits = make_x(num_tokens, torch.float32), make_x(num_tokens, torch.float32)[:, :5]
        got = ops.pack_experts(gate_up, down, routing)(x, logits)
        right = TorchOps().pack_experts(*values, routing)(x.double(), logits.double())
        assert ((got - right).abs() <= 1e-5 * right.abs().max()).all(), num_tokens


def test_threads_and_recordings_give_the_same_bits() -> None:
    table, _ = make_weight("Q4_1", 70)
    ids, x = torch.tensor([5, 69, 0], dtype=torch.int32), make_x(3, torch.float32)
    alone = make_ops(torch.float32, 1).blocks
    want = alone.linear(table, None)(x), alone.embed(ids, table, 2.0)
    torch.set_num_threads(3)  # the fixture restores it
    ops = make_ops(torch.float32, 3)
    linear = ops.blocks.linear(table, None)
    assert torch.equal(linear(x), want[0])
    assert torch.equal(ops.blocks.embed(ids, table, 2.0), want[1])
    program, output = ops.launcher.capture(lambda: linear(ops.blocks.embed(ids, table, 2.0)))
    program.run()
    assert torch.equal(output, linear(want[1]))


def test_a_broken_row_changes_no_other() -> None:
    linear = make_ops(torch.float32, 1).blocks.linear(make_weight("Q4_1", 70)[0], None)
    x = make_x(6, torch.float32)
    want = linear(x)
    x[2] = torch.nan
    got, others = linear(x), [0, 1, 3, 4, 5]
    assert torch.equal(got[others], want[others])
    assert got[2].isnan().all()


def test_halves_are_widened_without_an_instruction_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion for CPUs without F16C gives the same values, denormals included."""
    from numba import njit, types
    from numba.extending import intrinsic

    @intrinsic
    def widen(context, source, target):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            pointers = [
                context.make_array(t)(context, builder, a).data
                for t, a in zip(signature.args, args, strict=True)
            ]
            byte = ir.IntType(8).as_pointer()
            block = block_types.Block(builder, builder.bitcast(pointers[0], byte), (2,))
            values = block.half(0)
            builder.store(values, builder.bitcast(pointers[1], values.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(source, target), generate

    monkeypatch.setattr(block_types, "_has_halves", lambda: False)
    halves, wide = np.concatenate((EDGES, -EDGES)), np.empty(16, np.float32)
    njit(lambda source, target: widen(source, target))(halves.view(np.uint16), wide)
    np.testing.assert_array_equal(wide, halves.astype(np.float32))
