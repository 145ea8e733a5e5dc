"""How the persistent step divides its work: counts and layouts known when it is compiled."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SHARED_BYTES = 232448  # of a Hopper multiprocessor, for one program
TILE_BYTES = gl.constexpr(16384)


@gluon.constexpr_function
def num_chunks(width):
    """Chunks of a vector, padded so that more than six are some groups of `group_chunks`."""
    chunks = -(-width // 1024)
    while chunks > 6 and all(chunks % size for size in (4, 5, 6, 7, 3)):
        chunks += 1
    return chunks


@gluon.constexpr_function
def num_blocks(lines):
    """Blocks of lines of a projection, of which each program has 8 of 1,024."""
    return -(-lines // 1024)


@gluon.constexpr_function
def is_held(blocks, chunks):
    """Whether all tiles of a projection are in registers before its x has come."""
    return blocks * chunks <= 6


@gluon.constexpr_function
def blocks_at_once(blocks, chunks):
    """Blocks of lines whose tiles are loaded together; wide ones go chunk by chunk instead."""
    if chunks > 3 and not is_held(blocks, chunks):
        return 1
    return max(n for n in range(1, 7) if blocks % n == 0 and n * chunks <= 6)


@gluon.constexpr_function
def group_chunks(chunks):
    """Chunks of a wide line that are waited for together."""
    return next(size for size in (4, 5, 6, 7, 3, 1) if chunks % size == 0)


@gluon.constexpr_function
def group_tiles(blocks, chunks):
    """Tiles that are used together, of as many blocks as are multiplied together."""
    if chunks > 3 and not is_held(blocks, chunks):
        return group_chunks(chunks)
    return blocks * chunks


@gluon.constexpr_function
def num_slots(hidden, num_heads, num_kv_heads, dim, mlp):
    """Tiles that the ring has room for, beside what the phases of a layer need in turn."""
    num_staged = max(map(num_chunks, (hidden, num_heads * dim, mlp)))
    heads = 16 * dim * 2 + power_of_two(num_heads // num_kv_heads) * 8 * (dim + 2) * 4
    scratch = max(num_staged * 2048, heads) + 8192 + 1024
    return min(12, (SHARED_BYTES - scratch) // TILE_BYTES.value)


@gluon.constexpr_function
def num_flying(hidden):
    """Tiles on their way at once: see the page."""
    return 3 if hidden >= 2048 else 2


@gluon.constexpr_function
def head_blocks_at_once(hidden):
    return {1: 4, 2: 2, 3: 2}.get(num_chunks(hidden), 1)


@gluon.constexpr_function
def num_head_blocks(vocab, hidden):
    at_once = head_blocks_at_once(hidden)
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
def joined_chunks(q_width, num_kv_heads):
    """Chunks of attention's output as `Attention.join` counts them: a column for each thread."""
    lanes = min(num_splits(num_kv_heads), 16)
    return max(32 // lanes, power_of_two(-(-q_width // 1024)))


@gluon.constexpr_function
def num_partials(q_width, num_kv_heads):
    """Of 16 bytes, in one buffer of splits that are to be joined; one more is written in vain."""
    return joined_chunks(q_width, num_kv_heads) * 1024 * num_splits(num_kv_heads) + 1


@gluon.constexpr_function
def split_layout(num_kv_heads):
    """[chunks, splits, 8 lines]: no two threads have the same, since who reads also empties."""
    lanes = min(num_splits(num_kv_heads), 16)
    return gl.BlockedLayout(
        [1, 1, 1], [1, lanes, 32 // lanes], [32 // lanes, 1, lanes // 4], [2, 1, 0]
    )


@gluon.constexpr_function
def key_layout():
    """32 keys as words of two: [4, 8, dim / 64, 32]."""
    return gl.BlockedLayout([1, 1, 1, 8], [1, 8, 1, 4], [4, 1, 2, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def value_layout(dim):
    """[heads, 8 warps, 4 values, dim / 2 words]."""
    return gl.BlockedLayout([1, 1, 4, dim // 64], [1, 1, 1, 32], [1, 8, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def head_rows(group):
    """Lines for the queries of a group, their key and their value."""
    return 8 if group <= 6 else 16


@gluon.constexpr_function
def head_layout(group):
    """[rows, dim / 4]: a warp for each of 8 lines."""
    return gl.BlockedLayout([head_rows(group) // 8, 1], [1, 32], [8, 1], [1, 0])


@gluon.constexpr_function
def join_layout(group):
    """[heads, 8 warps, dim]: a thread joins what the warps have of a column."""
    return gl.BlockedLayout([1, 8, 1], [1, 1, 32], [group, 1, 8 // group], [2, 1, 0])
