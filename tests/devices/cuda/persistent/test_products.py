"""Matmuls of the persistent step on numpy: weights of 16, 8 and 4 bits, and chosen experts."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.ops.quantized_weight import QuantizedWeight, pack_words
from tests.devices.cuda.persistent.gluon_on_numpy import Shared, Source, array, load_modules
from tests.ops.quantized_products import quantize_blocks, quantize_int4

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from nanovllm.devices.cuda.persistent.packed_weights import pack_scales
from nanovllm.devices.cuda.persistent.persistent_step import arrange_scales
from nanovllm.devices.cuda.persistent.sizes import (
    ExpertsShape,
    StepShape,
    num_halves,
    piece_segments,
    segment_groups,
)

NAMES = "sizes", "tile_mma", "exchange", "stream", "experts"


@pytest.fixture(scope="module")
def modules() -> Any:
    loaded = load_modules(*NAMES)
    return SimpleNamespace(**dict(zip(NAMES, loaded, strict=True)))


def make_weight(
    bits: int, num_out: int, num_in: int, has_zeros: bool, seed: int = 0
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_out, num_in, generator=generator)
    if bits == 8:
        quantized = quantize_blocks(values)
        factors = 1 + torch.rand(quantized.scales.shape, generator=generator)
        scales = quantized.scales * factors  # one per weight row
        return QuantizedWeight(8, pack_words(quantized.values), scales, None, num_in)
    int4, scales = quantize_int4(values, 128)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=generator)
    return QuantizedWeight(
        4, pack_words(int4), scales.bfloat16(), zeros if has_zeros else None, num_in
    )


@pytest.mark.parametrize("rows", [1, 2, 4, 8])  # varies fastest: they share a weight
@pytest.mark.parametrize(
    ("bits", "num_in", "has_zeros"),
    [
        (16, 4096, False),
        (16, 1536, False),
        (16, 448, False),
        (8, 4096, False),
        (8, 3072, False),
        (8, 12288, False),
        (8, 896, False),
        (4, 4096, False),
        (4, 2560, True),
        (4, 12288, True),
        (4, 2048, True),
    ],
)
def test_products(modules: Any, bits: int, num_in: int, has_zeros: bool, rows: int) -> None:
    """Multiply the tiles of one CTA, in a block with its weight rows and in one without them."""
    cta, num_out, blocks = 3, 1024 + 8, 2
    weight, dense = weight_of_products(bits, num_out, num_in, has_zeros)
    x, row_format = make_x(rows, num_in), modules.sizes.format_of(num_in, bits, rows)
    stream = make_stream(modules, bits, blocks * row_format.tiles, cta, rows=rows)
    weight_rows = modules.stream.WeightRows(0, num_out)
    stream.fetch(sources(weight), weight_rows, 0, 0, OWNERS, blocks, row_format, 1, 1, 99)
    found = multiply(modules, stream, x, blocks)
    wanted = (x.float() @ dense[8 * cta :][:8].T).numpy()
    assert np.allclose(found[0], wanted, rtol=1e-4, atol=1e-3)
    assert not found[1].any()


@lru_cache(maxsize=1)
def weight_of_products(bits: int, num_out: int, num_in: int, has_zeros: bool) -> tuple[Any, Tensor]:
    """Make a weight once for all numbers of rows."""
    weight = make_any(bits, num_out, num_in, 0, has_zeros)
    return weight, dequantized(weight)


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(("count", "top_k"), [(128, 8), (60, 4), (8, 2), (256, 8)])
def test_experts_are_chosen_by_their_logits(
    modules: Any, count: int, top_k: int, is_normalized: bool
) -> None:
    logits = make_x(1, count)[0]
    logits[5] = logits[3] = logits.max() + 1  # a tie: the smaller index comes first
    padded = torch.nn.functional.pad(logits.float(), (0, 1024 - count))
    words = padded.bfloat16().view(torch.int32).numpy()

    def poll_from(column: Any, buffer: int, count: int, step: int) -> list[Any]:
        """Return `count` pairs of words, `step` columns apart; a word has two columns."""
        first = np.broadcast_to(column // 2, (8, 32))
        return [array(words[first + k // 2 * step // 2 + k % 2]) for k in range(2 * count)]

    router_logits = SimpleNamespace(poll_from=poll_from)
    experts = make_experts(modules, (count, top_k, 64, is_normalized))
    experts.choose(router_logits, 0)
    odds = logits.float().softmax(0)
    order = sorted(range(count), key=lambda i: (-float(odds[i]), i))[:top_k]
    total = odds[order].sum() if is_normalized else 1.0
    assert experts.ids.values[0, :top_k].tolist() == order
    wanted = (odds[order] / total).bfloat16().float()
    assert np.allclose(experts.weights.values[:top_k, 0], wanted, rtol=1e-5)
    assert not experts.weights.values[top_k:].any()


COUNT, TOP_K, SIZE, HIDDEN, CTA, LAYER = 5, 3, 768, 1024, 100, 1
CHOSEN, WEIGHTS = [4, 0, 2], [0.5, 0.3, 0.2]


@pytest.fixture
def experts(modules: Any) -> Any:
    """CHOSEN experts with WEIGHTS, as if `choose` had run."""
    found = make_experts(modules, (COUNT, TOP_K, SIZE, True))
    found.ids.values[:, :TOP_K] = CHOSEN
    found.weights.values[:TOP_K] = np.array(WEIGHTS)[:, None]
    return found


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_weight_rows_are_of_chosen_experts(modules: Any, experts: Any, bits: int) -> None:
    """Gate and up of the chosen experts are the weight rows of one wide MLP."""
    gate_up = [make_any(bits, 2 * SIZE, HIDDEN, seed) for seed in range(2 * COUNT)]
    row_format, blocks = modules.sizes.format_of(HIDDEN, bits), 3
    stream = make_stream(modules, bits, 2 * blocks * row_format.tiles, CTA)
    weight_rows = modules.experts.ExpertRows(experts.wait(LAYER), TOP_K * SIZE, SIZE)
    stream.fetch(sources(*gate_up), weight_rows, 0, 0, OWNERS, blocks, row_format, 2, 1, 99)
    x = make_x(1, HIDDEN)
    found = multiply(modules, stream, x, 2 * blocks)[:, 0]
    wide = [dequantized(gate_up[COUNT * LAYER + i]) @ x[0].float() for i in CHOSEN]
    for part in range(2):
        weight_rows = torch.cat([y[part * SIZE :][:SIZE] for y in wide])
        wanted = torch.nn.functional.pad(weight_rows, (0, blocks * 1024 - len(weight_rows)))
        wanted = wanted.view(blocks, -1)[:, 8 * CTA :][:, :8].numpy()
        assert np.allclose(found[part::2], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_columns_are_of_chosen_experts(modules: Any, experts: Any, bits: int) -> None:
    """Gated values of the chosen experts, times their weights, are the columns of that MLP."""
    sizes, gated = modules.sizes, make_x(1, TOP_K * SIZE)[0]
    down = [make_any(bits, HIDDEN, SIZE, seed) for seed in range(2 * COUNT)]
    capacity, piece = sizes.expert_columns(SIZE, bits), sizes.scale_piece(SIZE, bits)
    row_format, num_chunks = (
        sizes.format_of(TOP_K * capacity, bits),
        sizes.num_chunks(TOP_K * capacity, bits),
    )
    stream = make_stream(modules, bits, row_format.tiles, CTA, piece)
    given, chosen = sources(*down, is_of_experts=True), experts.wait(LAYER)
    experts.fetch_down(
        stream, given, chosen, 0, 0, OWNERS, HIDDEN, 1, row_format, 1, row_format.tiles
    )
    padded = torch.nn.functional.pad(gated.view(TOP_K, SIZE), (0, capacity - SIZE)).flatten()
    padded = torch.nn.functional.pad(padded, (0, num_chunks * 1024 - len(padded)))
    chunks = padded.view(torch.int32).view(-1, 8, 32, 2).numpy()
    words = tuple(array(chunk[..., half]) for chunk in chunks for half in range(2))

    def poll(buffer: int, first: int, count: int) -> tuple[Any, ...]:
        return words[2 * first : 2 * (first + count)]

    exchange = SimpleNamespace(poll=poll, size=num_chunks * 1024, capacity=capacity)
    found = multiply_staged(
        modules, stream, experts.stage_gated(exchange, 0, bits), 1, row_format, piece
    )[:, 0]
    wanted = torch.zeros(HIDDEN)
    for part, weight, i in zip(gated.view(TOP_K, SIZE), WEIGHTS, CHOSEN, strict=True):
        weighed = (part.float() * weight).bfloat16().float()
        wanted += dequantized(down[COUNT * LAYER + i]) @ weighed
    assert np.allclose(found[0], wanted[8 * CTA :][:8].numpy(), rtol=1e-4, atol=1e-3)


OWNERS = array(np.zeros(32, np.int32))


def make_x(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).bfloat16()


def make_any(bits: int, num_out: int, num_in: int, seed: int, has_zeros: bool = True) -> Any:
    if bits == 16:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num_out, num_in, generator=generator).bfloat16()
    return make_weight(bits, num_out, num_in, has_zeros, seed)


def dequantized(weight: Any) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def sources(*weights: Any, is_of_experts: bool = False) -> tuple[Source, Source]:
    """TMA descriptors of concatenated weights and of their scales."""
    if isinstance(weights[0], Tensor):
        bits, weight_rows, scales = 16, torch.cat(weights), torch.zeros(0, dtype=torch.int32)
    else:
        bits = weights[0].bits
        weight_rows = torch.cat([weight.qweight for weight in weights]).view(torch.bfloat16)
        parts = torch.cat([pack_scales(weight) for weight in weights])
        scales = arrange_scales(parts, bits, is_of_experts)
    width = weight_rows.shape[1] * 16 // bits
    piece = piece_segments(width, bits) if is_of_experts else 8 * num_halves(width, bits)
    values = weight_rows.view(len(weight_rows), -1, 64).transpose(0, 1).view(torch.int16).numpy()
    size = 8 * segment_groups(bits) * piece
    return Source(values.view(np.uint16), [piece, 8, 64]), Source(scales.numpy(), [size])


def make_stream(
    modules: Any, bits: int, num_tiles: int, cta: int, piece: int = 8, rows: int = 1
) -> Any:
    """Make a stream whose ring holds all tiles."""
    ring = np.zeros((num_tiles, 16, 8, 64), np.uint16)
    words = ring.view(np.int32).reshape(num_tiles, 16, 8, 32)
    num_scales = 16 // piece * modules.sizes.scale_words(bits, piece)
    scales = np.zeros((num_tiles, num_scales), np.int32)
    barriers = SimpleNamespace(index=lambda i: None)
    memory = Shared(ring), Shared(words), Shared(scales), barriers, barriers
    sums = Shared(np.zeros((8, 8, rows, 8), np.float32))
    return modules.stream.Stream(*memory, sums, sums, cta, 8, rows, num_tiles, 99, bits)


def make_experts(modules: Any, numbers: tuple[int, int, int, bool]) -> Any:
    ids, weights = (
        Shared(np.zeros((8, 32), np.int32)),
        Shared(np.zeros((32, 8), np.float32)),
    )
    shape = StepShape(*(0,) * 7, ExpertsShape(*numbers))
    return modules.experts.Experts(ids, weights, None, shape)


def multiply(modules: Any, stream: Any, x: Tensor, num_blocks: int) -> np.ndarray:
    """Stage x [rows, in] and multiply the tiles in the ring by it."""
    width = x.shape[1]
    size = modules.sizes.num_chunks(width, stream.bits) * 1024
    padded = torch.nn.functional.pad(x.float(), (0, size - width))
    staged: Any = ()
    for k, chunk in enumerate(padded.view(len(x), -1, 8, 128).unbind(1)):
        rows = tuple(array(row.numpy()) for row in chunk)
        staged = modules.tile_mma.stage(staged, k, rows, stream.bits)
    row_format = modules.sizes.format_of(width, stream.bits, len(x))
    return multiply_staged(modules, stream, staged, num_blocks, row_format)


def multiply_staged(
    modules: Any,
    stream: Any,
    staged: Any,
    num_blocks: int,
    row_format: tuple[int, ...],
    piece: int = 8,
) -> np.ndarray:
    """Return the sums of the 8 weight rows of each block, for each row: [blocks, rows, 8]."""
    x_registers = stream.load_x_registers(staged, row_format)
    sums = stream.multiply_blocks(0, 0, (), staged, x_registers, num_blocks, row_format, 99, piece)
    return stream.reduce(sums, num_blocks)[:num_blocks]
