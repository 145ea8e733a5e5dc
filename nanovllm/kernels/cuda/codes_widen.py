"""Kept weights widened to matrices, for products of many rows that have no kernel of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.code_words import as_floats, load_words
from nanovllm.kernels.stored_weights import StoredWeight, num_blocks

BLOCK_OUT = 32


def widen_codes(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in a dtype of 16 bits: the numbers that loading would make."""
    num_out, num_in = weight.shape
    blocks, num_words = num_blocks(num_in), weight.words.shape[1]
    y = torch.empty(num_out, num_in, device=weight.words.device, dtype=dtype)
    _widen[(blocks, triton.cdiv(num_out, BLOCK_OUT))](
        *(y, weight.words, weight.scales, weight.zeros, num_out),
        NUM_IN=num_in,
        NUM_WORDS=num_words,
        LANES=num_words // blocks,
        GROUP=weight.group,
        BLOCK_OUT=BLOCK_OUT,
        num_warps=4,
    )
    return y


@triton.jit
def _widen(  # type: ignore[no-untyped-def]
    y,
    words,
    scales,
    zeros,
    num_out,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """The grid is (blocks of inputs, outputs)."""
    PLACES: tl.constexpr = 128 // LANES
    PARTS: tl.constexpr = 128 // GROUP if GROUP > 0 else 1
    NUM_GROUPS: tl.constexpr = NUM_WORDS // LANES * PARTS if GROUP > 0 else 1
    block = tl.program_id(0)
    out = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < num_out
    lanes = tl.arange(0, LANES)
    tile = load_words(words, out, is_out, block * LANES + lanes, NUM_WORDS)
    for n in tl.static_range(PLACES):
        group = block * PARTS + n * PARTS // PLACES if GROUP > 0 else 0
        place = out.to(tl.int64) * NUM_GROUPS + group
        values = as_floats(tile, n, PLACES)
        if zeros is not None:
            values -= tl.load(zeros + place, mask=is_out, other=0).to(tl.float32)[:, None]
        elif PLACES == 8:
            values -= 8.0
        values *= tl.load(scales + place, mask=is_out, other=0.0).to(tl.float32)[:, None]
        i = block * 128 + LANES * n + lanes
        mask = is_out[:, None] & (i < NUM_IN)[None, :]
        places = y + out.to(tl.int64)[:, None] * NUM_IN + i[None, :]
        tl.store(places, values.to(y.dtype.element_ty), mask=mask)
