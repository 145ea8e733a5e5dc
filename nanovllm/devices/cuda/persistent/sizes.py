"""Compile-time sizes of the persistent step: which models it supports, and how work is divided.

Glossary (see docs/persistent-step.md):

- word: 32 bits, which hold two bfloat16, four FP8 or eight 4-bit values.
- exchange: a vector that CTAs pass to each other through buffers in L2. CTAs publish their columns,
  and poll those of other CTAs.
- staged: copied to shared memory, in the order in which the multiplication reads it.
- chunk: 1,024 columns of a vector such as x.
- segment: 128 bytes of a weight row. In attention.py only, a `Segment` is a CTA's range of keys of
  one row and KV head.
- tile: 16 KB of a projection, which fill one slot of the ring buffer: 16 segments of each of 8
  weight rows. A tile has 1,024 columns in bfloat16, 2,048 in 8 bits and 4,096 in 4 bits.
- slot: the place of a tile in the ring buffer. `slots` of sequences are those of the InputBatch.
- half: half a tile: 8 segments of each weight row, one for each warp.
- block: 1,024 consecutive weight rows of a projection; each CTA computes 8 of them.
- group: tiles that are consumed together, so that their slots become free together.
- quant group: 128 quantized values that share a scale.
- piece of x: the columns of x by which half a tile is multiplied.
- piece of a tile, in the `down` of experts: the segments that one TMA copy loads.
- part: gate or up in gate_up, or the columns of one expert in the input of `down`.
- split: keys of one row and KV head whose attention is computed separately, then merged.
- partial: the partial attention result of one split for 8 output columns.
- unit: the 64 keys of one online-softmax update.
"""

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SHARED_BYTES = 232448  # shared memory of a CTA on Hopper
HALF_BYTES = gl.constexpr(8192)  # bytes of half a tile
MAX_EXPERTS = 256  # each lane of a warp holds up to eight router logits
MAX_TOP_K = 32
MIN_SLOTS = 7  # minimum size of the ring buffer: it must hold the largest group of tiles
MAX_ROWS = 8
UNIT = gl.constexpr(64)  # keys per online-softmax update
PARTIAL_WORDS = gl.constexpr(12)  # 8 sums, then two copies of the maximum score and denominator
# Maximum number of chunks of x, over all rows, that `o` and `down` stage together. A single tile
# may need more, and there is no maximum if all tiles are resident.
MAX_STAGED = 32


class ExpertsShape(NamedTuple):
    num_experts: int = 0
    top_k: int = 1
    size: int = 64  # intermediate size of one expert
    is_normalized: bool = False  # whether the weights of the chosen experts sum to one

    def problem(self, bits: int) -> str | None:
        if self.num_experts > MAX_EXPERTS or self.top_k > MAX_TOP_K:
            return f"routing to the top {self.top_k} of {self.num_experts} experts is not supported"
        if self.num_experts > 0 and (self.size % 8 or self.size * bits % 1024):
            return f"experts of intermediate size {self.size} are not supported"
        return None


NO_EXPERTS = ExpertsShape()


@dataclass(frozen=True, slots=True)
class StepShape:
    """Model sizes that a kernel is compiled for."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int  # intermediate size; with experts, the sum over the chosen experts
    vocab: int
    bits: int = 16  # bits per weight; the LM head and the router always have 16
    experts: ExpertsShape = NO_EXPERTS
    cache_bits: int = 16  # bits per value of the KV cache: 16 or 8 (FP8)

    @property
    def q(self) -> int:
        return int(q_width(self))

    @property
    def qkv(self) -> int:
        return int(qkv_width(self))

    @property
    def numbers(self) -> tuple[int, ...]:
        """All fields as a tuple: a dataclass cannot be a parameter of a kernel."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        bits = self.bits, self.cache_bits
        return self.hidden, *heads, self.mlp, self.vocab, *bits, *self.experts

    @property
    def problem(self) -> str | None:
        """Reason why there is no kernel for these sizes, or None."""
        group, rest = divmod(self.num_heads, self.num_kv_heads)
        if self.head_dim not in (64, 128):
            return f"head_dim is {self.head_dim}, not 64 or 128"
        if rest or group > 8 or self.num_kv_heads > 32:
            return (
                f"{self.num_heads} query heads for {self.num_kv_heads} KV heads are not supported"
            )
        if power_of_two(group) * self.head_dim < 256:  # two threads would store the same value
            return f"only {group} query heads of {self.head_dim} per KV head"
        if problem := self.experts.problem(self.bits):
            return problem
        width = {16: 64, 8: 128, 4: 256}[self.bits]  # columns of a segment, which TMA copies whole
        if self.hidden % width or self.mlp % width or self.q % width or self.hidden > 8192:
            return f"hidden size {self.hidden} and intermediate size {self.mlp} are not supported"
        return None if self.rows else "too little shared memory"

    @property
    def rows(self) -> tuple[int, ...]:
        """Batch sizes for which there is a kernel.

        Models with experts are limited to one row, because several rows would share too few
        experts. Quantized models are limited to four, because eight run faster layer by layer.
        """
        most = MAX_ROWS if self.bits == 16 else MAX_ROWS // 2
        most = 1 if self.experts.num_experts else most
        sizes = [1 << n for n in range(most.bit_length())]
        return tuple(rows for rows in sizes if num_slots(self, rows) >= MIN_SLOTS)


@gluon.constexpr_function
def tile_chunks(bits):
    """Return the number of chunks of x by which a tile is multiplied."""
    return 16 // bits


@gluon.constexpr_function
def segment_groups(bits):
    """Return the number of quant groups, and so of scales, per segment; 0 for 16-bit weights."""
    return {16: 0, 8: 1, 4: 2}[bits]


@gluon.constexpr_function
def num_chunks(width, bits=16):
    """Return the number of chunks of a vector, padded to half a tile or to whole tiles.

    The padding allows both the chunks and the tiles to be divided into groups of equal size; see
    `has_remainder`.
    """
    size = tile_chunks(bits)
    if num_halves(width, bits) == 1:
        return -(-size // 2)
    chunks = -(-width // 1024)
    while chunks % size or has_remainder(chunks) or has_remainder(chunks // size):
        chunks += 1
    return chunks


@gluon.constexpr_function
def num_stored(width):
    """Return the width of a vector, padded so that each of the 128 CTAs stores some columns."""
    return max(width, 1024)


@gluon.constexpr_function
def has_remainder(count):
    """Whether `count` exceeds six and no group size from 3 to 7 divides it."""
    return count > 6 and all(count % size for size in (4, 5, 6, 7, 3))


@gluon.constexpr_function
def num_halves(width, bits):
    """Return how many halves of a tile are used: 1 if a weight row fits into half a tile."""
    return 1 if width <= 512 * tile_chunks(bits) else 2


@gluon.constexpr_function
def num_tiles(width, bits):
    """Return the number of tiles per weight row."""
    return -(-num_chunks(width, bits) // tile_chunks(bits))


@gluon.constexpr_function
def num_blocks(weight_rows):
    """Return the number of blocks of a projection with `weight_rows` weight rows."""
    return -(-weight_rows // 1024)


@dataclass(frozen=True)
class RowFormat:
    """Layout of a projection's weight rows, and the number of batch rows they are multiplied by."""

    tiles: int  # tiles per weight row
    halves: int  # halves of each tile that are used: 1 or 2
    bits: int  # bits per weight
    rows: int = 1  # batch rows


@gluon.constexpr_function
def format_of(width, bits, rows=1):
    return RowFormat(num_tiles(width, bits), num_halves(width, bits), bits, rows)


@gluon.constexpr_function
def tile_words(row_format):
    """Return the number of registers per thread for a tile, including any scale words."""
    return row_format.halves * (8 if row_format.bits == 16 else 9)


@gluon.constexpr_function
def tile_scales(row_format):
    """Return the number of scale words per tile."""
    return row_format.halves * 64 * segment_groups(row_format.bits)


@gluon.constexpr_function
def tile_bytes(row_format):
    return row_format.halves * HALF_BYTES.value + 4 * tile_scales(row_format)


@gluon.constexpr_function
def is_wide(row_format):
    """Whether a weight row has too many tiles for all of x to stay in registers."""
    return row_format.tiles > {16: 3, 8: 2, 4: 1}[row_format.bits]


@gluon.constexpr_function
def max_resident(row_format):
    """Return the maximum number of tiles that are held in registers at once."""
    return 4 if (row_format.halves, row_format.bits) == (2, 4) else 6


@gluon.constexpr_function
def is_resident(blocks, row_format):
    """Whether all tiles of a projection are loaded into registers before x arrives.

    The registers must hold all tiles and, if the weights are quantized, all of x as well.
    """
    fits = blocks * row_format.tiles <= max_resident(row_format)
    return fits and (row_format.bits == 16 or not is_wide(row_format))


@gluon.constexpr_function
def is_streamed(blocks, row_format):
    """Whether tiles are multiplied one by one, not loaded into registers as a group."""
    return is_wide(row_format) and not is_resident(blocks, row_format)


@gluon.constexpr_function
def blocks_at_once(blocks, row_format):
    """Return the number of blocks that are multiplied before their sums are reduced over the warps.

    It divides `blocks`, so that all iterations have the same number of blocks.
    """
    if is_streamed(blocks, row_format):
        return 1
    return max(
        n
        for n in range(1, 7)
        if blocks % n == 0 and n * row_format.tiles <= max_resident(row_format)
    )


@gluon.constexpr_function
def tiles_at_once(blocks, row_format):
    """Return how many tiles of each block of `o` or `down` to multiply before more x is staged.

    If not all tiles are resident, the number is limited by the shared memory for x, the size of the
    unrolled code and the slots of the ring. It divides `row_format.tiles`.
    """
    if is_resident(blocks, row_format):
        return row_format.tiles
    limits = MAX_STAGED // (tile_chunks(row_format.bits) * row_format.rows), 16 // blocks, MIN_SLOTS
    return max(n for n in range(1, max(min(limits), 1) + 1) if row_format.tiles % n == 0)


@gluon.constexpr_function
def output_group(blocks, row_format):
    """Return the number of tiles per group of `o` or `down`."""
    if is_resident(blocks, row_format):
        return blocks * row_format.tiles
    return tiles_at_once(blocks, row_format)


@gluon.constexpr_function
def gate_blocks_at_once(blocks, row_format, is_of_experts):
    """Return how many gate blocks to load together with as many up blocks: a divisor of `blocks`.

    All are loaded together if they fit into registers. Otherwise, experts are limited to two blocks
    of each, because the copies of their weights start late.
    """
    if is_resident(2 * blocks, row_format):
        return blocks
    most = max_resident(row_format) // (2 * row_format.tiles)
    most = min(most, 2) if is_of_experts else most
    return max((n for n in range(1, most + 1) if blocks % n == 0), default=1)


@gluon.constexpr_function
def wide_group_tiles(tiles):
    """Return the number of tiles per group of a wide weight row: a divisor of `tiles`."""
    return next(size for size in (4, 5, 6, 7, 3, 2, 1) if tiles % size == 0)


@gluon.constexpr_function
def group_tiles(blocks, row_format):
    """Return the number of tiles per group when `blocks` blocks are multiplied together."""
    if is_streamed(blocks, row_format):
        return wide_group_tiles(row_format.tiles)
    return blocks * row_format.tiles


@gluon.constexpr_function
def q_width(shape):
    return shape.num_heads * shape.head_dim


@gluon.constexpr_function
def qkv_width(shape):
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


@gluon.constexpr_function
def gated_parts(shape):
    """Return the number of parts of the input of `down`: 1, or one per chosen expert."""
    return shape.experts.top_k if shape.experts.num_experts else 1


@gluon.constexpr_function
def gated_capacity(shape):
    """Return the padded width of each part of the input of `down`."""
    return (
        expert_columns(shape.experts.size, shape.bits) if shape.experts.num_experts else shape.mlp
    )


@gluon.constexpr_function
def gated_width(shape):
    """Return the padded width of the input of `down`."""
    return gated_parts(shape) * gated_capacity(shape)


@gluon.constexpr_function
def slot_scales(shape):
    """Return the number of scale words per slot, enough for any tile; 0 for 16-bit weights."""
    bits = shape.bits
    piece = scale_piece(shape.experts.size, bits) if shape.experts.num_experts else 8
    return 0 if bits == 16 else 16 // piece * scale_words(bits, piece)


@gluon.constexpr_function
def output_chunks(shape, rows):
    """Return, for `o` and for `down`, how many chunks of x are staged together at most."""
    blocks, found = num_blocks(shape.hidden), []
    for width in (q_width(shape), gated_width(shape)):
        row_format = format_of(width, shape.bits, rows)
        whole = num_chunks(width, shape.bits)
        at_once = tiles_at_once(blocks, row_format)
        parts = 1 if shape.experts.num_experts else row_format.tiles // at_once
        found.append(whole // parts)
    return found


@gluon.constexpr_function
def num_slots(shape, rows):
    """Return the number of ring slots (at most 12) that fit beside the scratch memory."""
    num_staged = max(num_chunks(shape.hidden, shape.bits), *output_chunks(shape, rows))
    vectors = num_head_vectors(shape.num_heads // shape.num_kv_heads, rows)
    heads = vectors * shape.head_dim * 2
    if shape.cache_bits == 8:  # their FP8 values and exponents, and the inverse scales of a unit
        heads += vectors * (shape.head_dim + 4) + UNIT.value * 4
    sums = 2 * 256 * num_sum_blocks(shape, rows) * rows
    scratch = max(num_staged * 2048 * rows, 8192) + heads + sums + 3072
    return min(12, (SHARED_BYTES - scratch) // (2 * HALF_BYTES.value + 4 * slot_scales(shape)))


@gluon.constexpr_function
def num_sum_blocks(shape, rows):
    """Return the number of blocks whose sums fit into shared memory: enough for every phase."""
    row_format, head = format_of(shape.hidden, shape.bits, rows), format_of(shape.hidden, 16, rows)
    return power_of_two(
        max(
            4,
            num_blocks(num_stored(shape.hidden)),
            blocks_at_once(num_blocks(qkv_width(shape)), row_format),
            gate_blocks_at_once(num_blocks(shape.mlp), row_format, shape.experts.num_experts > 0),
            head_blocks_at_once(head.tiles),
        )
    )


@gluon.constexpr_function
def num_copies(rows):
    """Return the number of threads that hold the same sum of a weight row."""
    return max(4 // rows, 1)


@gluon.constexpr_function
def sums_layout(blocks, rows):
    """Return the layout of the warps' sums, [8 warps, copies, blocks, rows, 8 weight rows].

    A thread holds the sums of all warps, so that it can add them up.
    """
    copies, warps = num_copies(rows), min(blocks, 8)
    return gl.BlockedLayout(
        [8, 1, 1, 1, 1],
        [1, copies, 1, 4 // copies, 8],
        [1, 1, warps, 8 // warps, 1],
        [4, 3, 2, 1, 0],
    )


@gluon.constexpr_function
def num_in_flight(hidden):
    """Return the maximum number of tiles in flight; more would slow down the exchanges."""
    return 3 if hidden >= 2048 else 2


@gluon.constexpr_function
def tiles_in_flight(row_format, in_flight, slots):
    """Return the number of tiles to keep in flight, which is less than the number of slots.

    If only half of each tile is used, the number is twice `in_flight`.
    """
    return min(in_flight * 2 // row_format.halves, slots - 1)


@gluon.constexpr_function
def head_blocks_at_once(tiles):
    return {1: 4, 2: 2, 3: 2}.get(tiles, 1)


@gluon.constexpr_function
def num_head_blocks(vocab, tiles):
    at_once = head_blocks_at_once(tiles)
    return -(-num_blocks(vocab) // at_once) * at_once


@gluon.constexpr_function
def power_of_two(count):
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


@gluon.constexpr_function
def num_splits(num_kv_heads):
    """Return the maximum number of splits of a row's keys for one KV head.

    It is 32, unless a row would then have more than 128 splits over all KV heads.
    """
    splits = 32
    while splits * num_kv_heads > 128:
        splits //= 2
    return splits


@gluon.constexpr_function
def num_output_groups(q_width):
    """Return the number of 8-column groups in a row's attention output, padded to whole chunks."""
    return -(-q_width // 1024) * 128


@gluon.constexpr_function
def merge_groups(q_width, num_kv_heads, rows):
    """Return the number of 8-column groups that a CTA merges, over all rows.

    It is padded to occupy all threads.
    """
    return max(rows * power_of_two(-(-q_width // 1024)), 256 // num_splits(num_kv_heads))


@gluon.constexpr_function
def merge_layout(num_kv_heads):
    """Return the layout [groups, splits].

    It has no replication, because the thread that reads a partial also clears it.
    """
    splits = num_splits(num_kv_heads)
    return gl.BlockedLayout([1, 1], [32 // splits, splits], [8, 1], [1, 0])


@gluon.constexpr_function
def key_layout(bits):
    """Return the layout of 32 keys as words: [4, 8, dim / 64, 32], or 16 words per segment in FP8.

    With either number of bits, a thread has the same 16 dimensions of a key.
    """
    return gl.BlockedLayout([1, 1, 1, bits // 2], [1, 8, 1, 4], [4, 1, 2, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def score_layout():
    """Return the layout of the scores of 16 of 32 keys: [4, 8 heads, dim / 64, 4]."""
    return gl.BlockedLayout([1, 1, 1, 1], [1, 8, 1, 4], [4, 1, 2, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def num_head_vectors(group, new):
    """Return the padded number of head vectors of a `Segment` of attention.

    These are the queries of a GQA group, `new` keys and `new` values.
    """
    return max(8, power_of_two(group + 2 * new))


@gluon.constexpr_function
def head_vector_layout(vectors):
    """Return the layout [head vectors, dim / 4]: each warp has an eighth of the vectors."""
    return gl.BlockedLayout([vectors // 8, 1], [1, 32], [8, 1], [1, 0])


@gluon.constexpr_function
def segments(width, bits):
    """Return the number of segments per weight row."""
    return width * bits // 1024


@gluon.constexpr_function
def expert_segments(size, bits):
    """Return the number of segments per weight row of an expert's `down`.

    It is padded so that fewer TMA copies are needed.
    """
    count = segments(size, bits)
    return power_of_two(count) if count < 4 else -(-count // 4) * 4


@gluon.constexpr_function
def expert_columns(size, bits):
    return expert_segments(size, bits) * 1024 // bits


@gluon.constexpr_function
def piece_segments(size, bits):
    """Return how many segments of each weight row of an expert's `down` a TMA copy loads."""
    return next(n for n in (16, 8, 4, 2, 1) if expert_segments(size, bits) % n == 0)


@gluon.constexpr_function
def scale_words(bits, piece):
    """Return how many words the scales of a piece occupy, aligned to 128 bytes for TMA."""
    return max(piece * 8 * segment_groups(bits), 32)


@gluon.constexpr_function
def scale_piece(size, bits):
    """Return how many segments have contiguous scales in a slot: at most those of half a tile."""
    return min(piece_segments(size, bits), 8)
