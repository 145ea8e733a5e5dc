"""Grammar bitmasks on CUDA: one pass that writes only the logits of disallowed tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens per CTA


def apply_token_bitmask(
    logits: Tensor,
    rows: Tensor | None,
    words: Tensor,
    slots: Tensor | None = None,
    padding: int = 0,
) -> None:
    """Implement torch_logits.apply_token_bitmask; rows whose slot is `padding` are not masked."""
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1, "the logits of a row must be contiguous"
    num_rows = len(words) if slots is None else len(slots)
    _keep_allowed_kernel[num_rows, triton.cdiv(vocab_size, BLOCK)](
        *(logits, logits.stride(0), rows, words, words.stride(0), slots, padding, vocab_size, BLOCK)
    )


@triton.jit(do_not_specialize=("padding",))
def _keep_allowed_kernel(  # type: ignore[no-untyped-def]
    logits, stride, rows, words, words_stride, slots, padding, vocab_size, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row = index
    if rows is not None:
        row = tl.load(rows + index)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    if slots is not None:
        is_token &= tl.load(slots + index) != padding
    word = tl.load(words + index * words_stride + ids // 32, mask=is_token, other=0)
    is_forbidden = ((word >> (ids % 32)) & 1) == 0
    tl.store(logits + row * stride + ids, -float("inf"), mask=is_token & is_forbidden)
