"""Which sizes the persistent step supports, and how work is divided; needs no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from nanovllm.devices.cuda.persistent.persistent_step import allocate_exchange
from nanovllm.devices.cuda.persistent.sizes import (
    MIN_SLOTS,
    ExpertsShape,
    RowFormat,
    StepShape,
    blocks_at_once,
    expert_columns,
    format_of,
    gate_blocks_at_once,
    gated_width,
    group_tiles,
    head_blocks_at_once,
    is_resident,
    merge_groups,
    num_blocks,
    num_chunks,
    num_halves,
    num_slots,
    num_splits,
    num_tiles,
    output_chunks,
    output_group,
    piece_segments,
    tiles_at_once,
    wide_group_tiles,
)
from tests.devices.cuda.persistent.test_step import EXPERTS, SHAPES

SMALL = StepShape(1024, 16, 8, 128, 3072, 151936)


@pytest.mark.parametrize("name", list(SHAPES))
def test_well_known_models_are_supported(name: str) -> None:
    assert StepShape(*SHAPES[name]).problem is None


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (StepShape(1024, 16, 8, 96, 3072, 1000), "head_dim is 96"),
        (StepShape(1024, 32, 2, 64, 3072, 1000), "32 query heads for 2 KV heads"),
        (StepShape(1024, 9, 2, 64, 3072, 1000), "9 query heads for 2 KV heads"),
        (StepShape(4096, 32, 32, 128, 11008, 1000), "only 1 query heads of 128 per KV head"),
        (StepShape(1024, 16, 8, 64, 3072, 1000), "only 2 query heads of 64 per KV head"),
        (StepShape(1000, 16, 8, 128, 3072, 1000), "hidden size 1000 and intermediate size 3072"),
        (StepShape(16384, 128, 16, 128, 53248, 1000), "hidden size 16384"),
    ],
    ids=str,
)
def test_problems_of_unsupported_shapes(shape: StepShape, problem: str) -> None:
    assert problem in str(shape.problem)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", range(256, 30000, 1280))
def test_vectors_are_whole_quantized_tiles(width: int, bits: int) -> None:
    chunks, tiles = num_chunks(width, bits), num_tiles(width, bits)
    assert width <= chunks * 1024 == tiles * (16 // bits) * 512 * num_halves(width, bits)
    for count in (chunks, tiles):
        assert count <= 6 or (count % wide_group_tiles(count) == 0 and wide_group_tiles(count) > 1)


@pytest.mark.parametrize("width", range(64, 30000, 448))
def test_wide_vectors_are_whole_groups(width: int) -> None:
    chunks = num_chunks(width)
    assert width <= chunks * 1024
    assert chunks - -(-width // 1024) <= 1 + (chunks > 20)
    assert chunks <= 6 or (chunks % wide_group_tiles(chunks) == 0 and wide_group_tiles(chunks) > 1)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 6, 7, 12])
@pytest.mark.parametrize("rows", [1, 8])
def test_blocks_are_multiplied_in_equal_parts(
    rows: int, blocks: int, tiles: int, halves: int, bits: int
) -> None:
    row_format = RowFormat(tiles, halves, bits, rows)
    assert tiles % tiles_at_once(blocks, row_format) == 0
    at_once = blocks_at_once(blocks, row_format)
    assert blocks % at_once == 0
    assert at_once == 1 or at_once * tiles <= 6
    assert at_once == blocks or not is_resident(blocks, row_format)
    for is_of_experts in (False, True):
        gated = gate_blocks_at_once(blocks, row_format, is_of_experts)
        assert blocks % gated == 0
        assert gated == 1 or 2 * gated * tiles <= 6
        assert gated == blocks or not is_resident(2 * blocks, row_format)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 5, 8, 16, 32])
def test_splits_fit_the_ctas(num_kv_heads: int) -> None:
    splits = num_splits(num_kv_heads)
    assert num_kv_heads * splits <= 128
    assert merge_groups(64, num_kv_heads, 1) * splits >= 256  # each partial result has one reader


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("size", range(256, 4097, 256))
def test_experts_rows_are_padded_to_few_pieces(size: int, bits: int) -> None:
    capacity, piece = expert_columns(size, bits), piece_segments(size, bits)
    assert size <= capacity < 2 * size
    assert capacity * bits // 1024 % piece == 0
    assert piece >= 4 or capacity == size * bits // 1024 * 1024 // bits


def test_padding_of_experts_is_not_polled() -> None:
    memory = allocate_exchange(3 * 768, 1, torch.device("cpu"), 4, 3, 1024)
    columns = torch.arange(memory.shape[-1])
    is_value = (columns < 3 * 1024) & (columns % 1024 < 768)
    assert memory.shape[-1] == 4096
    assert torch.equal(memory[0, 0, 0] == -1, is_value)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", [*SHAPES, *EXPERTS])
def test_groups_fit_the_ring(name: str, bits: int) -> None:
    experts, sizes = EXPERTS[name] if name in EXPERTS else ((), SHAPES[name])
    shape = StepShape(*sizes, bits, ExpertsShape(*experts))
    if shape.problem is not None:
        pytest.skip(shape.problem)
    widths = shape.hidden, shape.q, gated_width(shape)
    for rows in shape.rows:
        hidden, q, mlp = (format_of(width, bits, rows) for width in widths)
        head, blocks = format_of(shape.hidden, 16, rows), num_blocks(shape.hidden)
        groups = [
            group_tiles(blocks_at_once(num_blocks(shape.qkv), hidden), hidden),
            output_group(blocks, q),
            group_tiles(
                2 * gate_blocks_at_once(num_blocks(shape.mlp), hidden, bool(experts)), hidden
            ),
            output_group(blocks, mlp),
            group_tiles(head_blocks_at_once(head.tiles), head),
        ]
        assert max(groups) <= MIN_SLOTS <= num_slots(shape, rows)
        assert experts or max(output_chunks(shape, rows)) * rows <= 48


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b", "qwen3-8b"])
def test_up_to_eight_rows_of_dense_models(name: str, bits: int) -> None:
    assert StepShape(*SHAPES[name], bits).rows == ((1, 2, 4, 8) if bits == 16 else (1, 2, 4))
    assert StepShape(*EXPERTS["few"][1], bits, ExpertsShape(*EXPERTS["few"][0])).rows == (1,)
