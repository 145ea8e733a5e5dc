"""What the kernels of paged attention share.

The query heads that share a kv head are lines of one tile, so each key is read once for them all.
Keys outside a row's context or window are never used: their blocks may hold anything, or be gone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # the softmax runs in base 2, which the hardware has an instruction for
MIN_LINES = 16  # tl.dot takes no fewer
# They may begin anywhere in an upload: a kernel for every alignment would be compiled anew.
COLUMNS = (
    *("slots", "context_lens", "query_starts", "query_lens", "query_index", "order"),
    *("members", "shared_lens"),
)


def kernel_shape(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    out: Tensor | None,
    window: int | None,
) -> dict[str, int | None]:
    """Collect what a kernel is compiled for, and check the layouts that it takes for granted."""
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    assert num_heads % num_kv_heads == 0
    assert block_size % 16 == 0
    assert q.stride()[1:] == (head_dim, 1)
    assert out is None or (out.shape == q.shape and out.is_contiguous())
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1)
    assert table.stride(1) == 1
    sizes = {"GROUP": num_heads // num_kv_heads, "KV_HEADS": num_kv_heads, "BLOCK_SIZE": block_size}
    padded = triton.next_power_of_2(head_dim)
    return {"WINDOW": window, "HEAD_DIM": head_dim, "DIM_PAD": padded, **sizes}


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    heads, places, dims, is_key, HEAD_DIM: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Load keys or values [TILE, DIM_PAD]; what is not a key is zeros, whatever is there."""
    tile = heads + (places[:, None] + dims[None, :])
    is_dim = (dims < HEAD_DIM)[None, :]
    if not IS_WHOLE:
        values = tl.load(tile, mask=is_key[:, None] & is_dim, other=0.0)
    elif dims.shape[0] != HEAD_DIM:
        values = tl.load(tile, mask=is_dim, other=0.0)
    else:
        values = tl.load(tile)
    return values


@triton.jit
def begin_softmax(LINES: tl.constexpr, DIM_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sums of values, the maxima and the sums of weights of lines without keys yet."""
    line_max = tl.full((LINES,), float("-inf"), tl.float32)
    return tl.zeros((LINES, DIM_PAD), tl.float32), line_max, tl.zeros((LINES,), tl.float32)


@triton.jit
def store_softmax(out, out_lines, dims, acc, line_sum, is_real, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    values = (acc / line_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_lines[:, None] * HEAD_DIM + dims[None, :], values, mask=is_real)


@triton.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    acc,
    line_max,
    line_sum,
    q_tile,
    k_cache,
    v_cache,
    blocks,
    block_ids,
    length,
    dims,
    lo,
    hi,
    first,
    end,
    full_lo,
    full_hi,
    firsts,
    lasts,
    block_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ARE_WHOLE: tl.constexpr,
):
    """Take the tiles from lo to hi in, whose keys from first to end are there, or all of them.

    Every line sees the keys from full_lo to full_hi; only tiles that reach beyond need a mask.
    Block ids are loaded a step ahead: a load that waits for another would end the pipelining.
    """
    for tile_start in tl.range(lo, hi, TILE):
        keys = tile_start + tl.arange(0, TILE)
        is_key = (keys >= first) & (keys < end)
        places = block_ids * block_stride + keys % BLOCK_SIZE * WIDTH
        block_ids = find_blocks(blocks, tile_start + TILE, length, BLOCK_SIZE, TILE)
        is_partial = tile_start + TILE > full_hi
        if not ARE_WHOLE:
            is_partial = (tile_start < full_lo) | is_partial
        acc, line_max, line_sum = attend_tile(
            *(acc, line_max, line_sum, q_tile, k_cache, v_cache, places, dims, keys, is_key),
            *(firsts, lasts, is_partial, scale, HEAD_DIM, ARE_WHOLE),
        )
    return acc, line_max, line_sum, block_ids


@triton.jit
def attend_tile(  # type: ignore[no-untyped-def]
    acc,
    line_max,
    line_sum,
    q_tile,
    k_cache,
    v_cache,
    places,
    dims,
    keys,
    is_key,
    firsts,
    lasts,
    is_partial,
    scale,
    HEAD_DIM: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Take a tile of keys and values into the softmax so far.

    A line sees the keys from its first to its last; is_partial: not all of the tile's.
    """
    k = load_tile(k_cache, places, dims, is_key, HEAD_DIM, IS_WHOLE)
    scores = tl.dot(q_tile, k.T, input_precision="ieee")
    if is_partial:
        is_seen = (keys[None, :] >= firsts[:, None]) & (keys[None, :] <= lasts[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    weights, alpha, line_max, line_sum = weigh(scores, line_max, line_sum, scale)
    v = load_tile(v_cache, places, dims, is_key, HEAD_DIM, IS_WHOLE)
    acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, line_max, line_sum


@triton.jit
def weigh(scores, line_max, line_sum, scale):  # type: ignore[no-untyped-def]
    """Return a tile's weights, the factor for what came before, and the new maximum and sum."""
    new_max = tl.maximum(line_max, tl.max(scores, 1) * scale)
    # A line that has seen nothing yet: -inf minus -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])
    alpha = tl.exp2(line_max - shift)
    return weights, alpha, new_max, line_sum * alpha + tl.sum(weights, 1)


@triton.jit
def window_start(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that a query at a position sees."""
    return position * 0 if WINDOW is None else tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def find_blocks(  # type: ignore[no-untyped-def]
    blocks, tile_start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """The block of every key of a tile, or as a scalar the one that holds them all."""
    if BLOCK_SIZE % TILE == 0 or TILE % BLOCK_SIZE == 0:  # scalars, which take one load each
        first = tile_start // BLOCK_SIZE
        ids = tl.load(blocks + first, mask=tile_start < end, other=0)
        for i in tl.static_range(1, TILE // BLOCK_SIZE):
            is_used = tile_start + i * BLOCK_SIZE < end
            block_id = tl.load(blocks + first + i, mask=is_used, other=0)
            ids = tl.where(tl.arange(0, TILE) >= i * BLOCK_SIZE, block_id, ids)
    else:
        keys = tile_start + tl.arange(0, TILE)
        ids = tl.load(blocks + keys // BLOCK_SIZE, mask=keys < end, other=0)
    return ids.to(tl.int64)
