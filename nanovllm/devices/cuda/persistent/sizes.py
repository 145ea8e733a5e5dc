"""Which sizes the persistent step serves, and how it divides its work: all that is known when it
is compiled."""

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SHARED_BYTES = 232448  # of a Hopper multiprocessor, for one program
HALF_BYTES = gl.constexpr(8192)  # of a tile
MAX_EXPERTS = 256  # of which a lane of a warp has up to eight
MAX_TOP_K = 32
MIN_SLOTS = 7  # a group of tiles
MAX_ROWS = 8
UNIT = gl.constexpr(64)  # keys that are weighed together
PART_WORDS = gl.constexpr(12)  # of 8 columns of a split of attention
MAX_STAGED = 32  # chunks of x in shared memory, of all rows, unless more are needed at once


class ExpertsShape(NamedTuple):
    num_experts: int = 0
    top_k: int = 1
    size: int = 64  # of an expert's MLP
    is_normalized: bool = False  # whether the weights of the chosen sum to one

    def problem(self, bits: int) -> str | None:
        if self.num_experts > MAX_EXPERTS or self.top_k > MAX_TOP_K:
            return f"{self.top_k} of {self.num_experts} experts"
        if self.num_experts > 0 and (self.size % 8 or self.size * bits % 1024):
            return f"experts of {self.size}"
        return None


NO_EXPERTS = ExpertsShape()


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a kernel is compiled for."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int  # of experts: all that a token goes to
    vocab: int
    bits: int = 16  # of all weights but the head's and the router's
    experts: ExpertsShape = NO_EXPERTS

    @property
    def q(self) -> int:
        return int(q_width(self))

    @property
    def qkv(self) -> int:
        return int(qkv_width(self))

    @property
    def numbers(self) -> tuple[int, ...]:
        """All of it: a kernel's parameter can be a tuple, but no record."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return self.hidden, *heads, self.mlp, self.vocab, self.bits, *self.experts

    @property
    def problem(self) -> str | None:
        """Why there is no kernel for these sizes."""
        group, rest = divmod(self.num_heads, self.num_kv_heads)
        if self.head_dim not in (64, 128):
            return f"heads of {self.head_dim}"
        if rest or group > 8 or self.num_kv_heads > 32:
            return f"{self.num_heads} heads with {self.num_kv_heads} of keys"
        if power_of_two(group) * self.head_dim < 256:  # two threads would hand on the same value
            return f"a kv head for every {group} of {self.head_dim}"
        if problem := self.experts.problem(self.bits):
            return problem
        part = {16: 64, 8: 128, 4: 256}[self.bits]  # of which the copy engine takes whole ones
        if self.hidden % part or self.mlp % part or self.q % part or self.hidden > 8192:
            return f"widths of {self.hidden} and {self.mlp}"
        return None if self.rows else "too little shared memory"

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that a step of these sizes may have.

        Those of experts share too few weights, and eight take longer to multiply with codes than
        layer by layer.
        """
        most = MAX_ROWS if self.bits == 16 else MAX_ROWS // 2
        most = 1 if self.experts.num_experts else most
        sizes = [1 << n for n in range(most.bit_length())]
        return tuple(rows for rows in sizes if num_slots(self, rows) >= MIN_SLOTS)


# A tile of codes is also 16 KB, so it has twice or four times the columns. Both of its halves are
# alike: 8 segments of 128 bytes of each line, one for each warp.


@gluon.constexpr_function
def tile_chunks(bits):
    """Chunks of a vector that a tile is multiplied with."""
    return 16 // bits


@gluon.constexpr_function
def segment_groups(bits):
    """Scales of a line in a segment: one for 128 codes; weights of 16 bits have none."""
    return {16: 0, 8: 1, 4: 2}[bits]


@gluon.constexpr_function
def num_chunks(width, bits=16):
    """Chunks of a vector, padded to half a tile or to whole ones: to so many that groups of chunks,
    and groups of tiles, leave no rest."""
    size = tile_chunks(bits)
    if num_halves(width, bits) == 1:
        return -(-size // 2)
    chunks = -(-width // 1024)
    while chunks % size or leaves_rest(chunks) or leaves_rest(chunks // size):
        chunks += 1
    return chunks


@gluon.constexpr_function
def num_stored(width):
    """Columns of a vector that every program stores 8 of, those beyond its width included."""
    return max(width, 1024)


@gluon.constexpr_function
def leaves_rest(count):
    """Whether so many cannot be cut into groups of one size: one group holds at most six."""
    return count > 6 and all(count % size for size in (4, 5, 6, 7, 3))


@gluon.constexpr_function
def num_halves(width, bits):
    """Halves of a line's tiles that are in use: of a narrow line, one."""
    return 1 if width <= 512 * tile_chunks(bits) else 2


@gluon.constexpr_function
def num_tiles(width, bits):
    """Tiles of a line of weights."""
    return -(-num_chunks(width, bits) // tile_chunks(bits))


@gluon.constexpr_function
def num_blocks(lines):
    """Blocks of lines of a projection, of which each program has 8 of 1,024."""
    return -(-lines // 1024)


@dataclass(frozen=True)
class Line:
    """How the lines of a projection are multiplied."""

    tiles: int
    halves: int  # of each tile
    bits: int  # of a weight
    rows: int = 1  # of x


@gluon.constexpr_function
def line_of(width, bits, rows=1):
    return Line(num_tiles(width, bits), num_halves(width, bits), bits, rows)


@gluon.constexpr_function
def tile_words(line):
    """Words of a tile in a thread, and those of factors."""
    return line.halves * (8 if line.bits == 16 else 9)


@gluon.constexpr_function
def tile_factors(line):
    """Factors of a tile of 8 lines."""
    return line.halves * 64 * segment_groups(line.bits)


@gluon.constexpr_function
def tile_bytes(line):
    return line.halves * HALF_BYTES.value + 4 * tile_factors(line)


@gluon.constexpr_function
def is_wide(line):
    """Whether a line has too many tiles for all of x to be in registers."""
    return line.tiles > {16: 3, 8: 2, 4: 1}[line.bits]


@gluon.constexpr_function
def max_held(line):
    """Tiles that registers have room for, beside x."""
    return 4 if (line.halves, line.bits) == (2, 4) else 6


@gluon.constexpr_function
def is_held(blocks, line):
    """Whether all tiles of a projection are in registers before its x has come."""
    return blocks * line.tiles <= max_held(line) and (line.bits == 16 or not is_wide(line))


@gluon.constexpr_function
def goes_by_tile(blocks, line):
    """Whether tiles are multiplied as they come, without being moved into registers first."""
    return is_wide(line) and not is_held(blocks, line)


@gluon.constexpr_function
def blocks_at_once(blocks, line):
    """Blocks of lines that are multiplied before their sums are added up."""
    if goes_by_tile(blocks, line):
        return 1
    return max(n for n in range(1, 7) if blocks % n == 0 and n * line.tiles <= max_held(line))


@gluon.constexpr_function
def columns_at_once(blocks, line):
    """Tiles of each block of a projection back that are multiplied before x of the next is read:
    few enough for x in shared memory, and for the code of all."""
    if is_held(blocks, line):
        return line.tiles
    limits = MAX_STAGED // (tile_chunks(line.bits) * line.rows), 16 // blocks, MIN_SLOTS
    return max(n for n in range(1, max(min(limits), 1) + 1) if line.tiles % n == 0)


@gluon.constexpr_function
def back_group(blocks, line):
    """Tiles of a projection back that are used together."""
    return blocks * line.tiles if is_held(blocks, line) else columns_at_once(blocks, line)


@gluon.constexpr_function
def gated_at_once(blocks, line, is_of_experts):
    """Blocks of gate, and as many of up, that are loaded together: all, if registers hold them.

    Those of experts are asked for late, so multiplying begins with two blocks of each at most.
    """
    if is_held(2 * blocks, line):
        return blocks
    most = max_held(line) // (2 * line.tiles)
    most = min(most, 2) if is_of_experts else most
    return max((n for n in range(1, most + 1) if blocks % n == 0), default=1)


@gluon.constexpr_function
def group_chunks(tiles):
    """Tiles of a wide line that are waited for together."""
    return next(size for size in (4, 5, 6, 7, 3, 2, 1) if tiles % size == 0)


@gluon.constexpr_function
def group_tiles(blocks, line):
    """Tiles that are used together, of as many blocks as are multiplied together."""
    if goes_by_tile(blocks, line):
        return group_chunks(line.tiles)
    return blocks * line.tiles


@gluon.constexpr_function
def q_width(shape):
    return shape.num_heads * shape.head_dim


@gluon.constexpr_function
def qkv_width(shape):
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


@gluon.constexpr_function
def gated_parts(shape):
    """Parts of what goes into `down`: one for each chosen expert."""
    return shape.experts.top_k if shape.experts.num_experts else 1


@gluon.constexpr_function
def gated_room(shape):
    """Columns of a part, those that fill an expert's lines up included."""
    return (
        expert_columns(shape.experts.size, shape.bits) if shape.experts.num_experts else shape.mlp
    )


@gluon.constexpr_function
def gated_width(shape):
    """Columns of `down`."""
    return gated_parts(shape) * gated_room(shape)


@gluon.constexpr_function
def slot_factors(shape):
    """Words for the factors of any tile."""
    bits = shape.bits
    piece = factor_piece(shape.experts.size, bits) if shape.experts.num_experts else 8
    return 0 if bits == 16 else 16 // piece * factor_words(bits, piece)


@gluon.constexpr_function
def back_columns(shape, rows):
    """Chunks of x of o and of down that are in shared memory at once."""
    blocks, found = num_blocks(shape.hidden), []
    for width in (q_width(shape), gated_width(shape)):
        line = line_of(width, shape.bits, rows)
        whole = num_chunks(width, shape.bits)
        parts = 1 if shape.experts.num_experts else line.tiles // columns_at_once(blocks, line)
        found.append(whole // parts)
    return found


@gluon.constexpr_function
def num_slots(shape, rows):
    """Tiles that the ring has room for, beside what the phases of a layer need in turn."""
    num_staged = max(num_chunks(shape.hidden, shape.bits), *back_columns(shape, rows))
    lines = num_lines(shape.num_heads // shape.num_kv_heads, rows) * shape.head_dim * 2
    sums = 2 * 256 * num_sum_blocks(shape, rows) * rows
    scratch = max(num_staged * 2048 * rows, 8192) + lines + sums + 3072
    return min(12, (SHARED_BYTES - scratch) // (2 * HALF_BYTES.value + 4 * slot_factors(shape)))


@gluon.constexpr_function
def num_sum_blocks(shape, rows):
    """Blocks of lines whose sums have room: at least as many as are added up at once."""
    line, head = line_of(shape.hidden, shape.bits, rows), line_of(shape.hidden, 16, rows)
    return power_of_two(
        max(
            4,
            num_blocks(num_stored(shape.hidden)),
            blocks_at_once(num_blocks(qkv_width(shape)), line),
            gated_at_once(num_blocks(shape.mlp), line, shape.experts.num_experts > 0),
            head_blocks_at_once(head.tiles),
        )
    )


@gluon.constexpr_function
def num_copies(rows):
    """Threads that have the same sum of a line."""
    return max(4 // rows, 1)


@gluon.constexpr_function
def sums_layout(blocks, rows):
    """[8 parts of a sum, copies, blocks, rows, 8 lines]: a thread adds the parts up."""
    copies, warps = num_copies(rows), min(blocks, 8)
    return gl.BlockedLayout(
        [8, 1, 1, 1, 1],
        [1, copies, 1, 4 // copies, 8],
        [1, 1, warps, 8 // warps, 1],
        [4, 3, 2, 1, 0],
    )


@gluon.constexpr_function
def num_flying(hidden):
    """Tiles on their way at once: see the page."""
    return 3 if hidden >= 2048 else 2


@gluon.constexpr_function
def line_flying(line, flying, slots):
    """Tiles of a line on their way at once, if as many whole ones are."""
    return min(flying * 2 // line.halves, slots - 1)


@gluon.constexpr_function
def head_blocks_at_once(tiles):
    return {1: 4, 2: 2, 3: 2}.get(tiles, 1)


@gluon.constexpr_function
def num_head_blocks(vocab, tiles):
    at_once = head_blocks_at_once(tiles)
    return -(-num_blocks(vocab) // at_once) * at_once


@gluon.constexpr_function
def power_of_two(count):
    """The next power of two."""
    return 1 << (count - 1).bit_length()


@gluon.constexpr_function
def num_splits(num_kv_heads):
    """Programs per kv head."""
    splits = 32
    while splits * num_kv_heads > 128:
        splits //= 2
    return splits


@gluon.constexpr_function
def num_parts(q_width):
    """Groups of 8 columns that programs join, of a row."""
    return -(-q_width // 1024) * 128


@gluon.constexpr_function
def join_groups(q_width, num_kv_heads, rows):
    """Groups of 8 columns that a program joins, of all rows: at least one for each thread."""
    return max(rows * power_of_two(-(-q_width // 1024)), 256 // num_splits(num_kv_heads))


@gluon.constexpr_function
def join_layout(num_kv_heads):
    """[groups, splits]: no two threads have the same, since who reads also empties."""
    splits = num_splits(num_kv_heads)
    return gl.BlockedLayout([1, 1], [32 // splits, splits], [8, 1], [1, 0])


@gluon.constexpr_function
def key_layout():
    """32 keys as words of two: [4, 8, dim / 64, 32]."""
    return gl.BlockedLayout([1, 1, 1, 8], [1, 8, 1, 4], [4, 1, 2, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def num_lines(group, new):
    """Lines for the queries of a group, and the keys and values of so many new tokens."""
    return max(8, power_of_two(group + 2 * new))


@gluon.constexpr_function
def line_layout(lines):
    """[lines, dim / 4]: a warp for every eighth of the lines."""
    return gl.BlockedLayout([lines // 8, 1], [1, 32], [8, 1], [1, 0])


@gluon.constexpr_function
def segments(width, bits):
    """Of 128 bytes, in a line of so many weights; a tile has 16."""
    return width * bits // 1024


@gluon.constexpr_function
def expert_segments(size, bits):
    """Of a line of an expert's `down` as part of a tile: filled up, so that few copies bring it."""
    count = segments(size, bits)
    return power_of_two(count) if count < 4 else -(-count // 4) * 4


@gluon.constexpr_function
def expert_columns(size, bits):
    return expert_segments(size, bits) * 1024 // bits


@gluon.constexpr_function
def piece_segments(size, bits):
    """Segments of a tile of experts' lines that can come together: none crosses two experts."""
    return next(n for n in (16, 8, 4, 2, 1) if expert_segments(size, bits) % n == 0)


@gluon.constexpr_function
def factor_words(bits, piece):
    """From the factors of a piece to those of the next: a multiple of 128 bytes."""
    return max(piece * 8 * segment_groups(bits), 32)


@gluon.constexpr_function
def factor_piece(size, bits):
    """Segments whose factors come together: those of half a tile, or fewer."""
    return min(piece_segments(size, bits), 8)
