"""Logprobs of tokens on CUDA: one pass over the logits does nearly all of the work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits per CTA
GROUP_SIZE = 32  # neighboring token ids per group, whose largest logit is stored


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Implement torch_logits.token_logprobs."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "the logits of a row must be contiguous"
    num_blocks, num_groups = triton.cdiv(vocab_size, BLOCK), triton.cdiv(vocab_size, GROUP_SIZE)
    maxima, sums, counts = logits.new_empty(3, num_rows, num_blocks, dtype=torch.float32)
    group_maxima = logits.new_empty(num_rows, num_groups, dtype=torch.float32)
    if num_rows > 0:
        _blocks_kernel[num_rows, num_blocks](
            *(maxima, sums, counts, group_maxima, logits, logits.stride(0), tokens, vocab_size),
            *(num_groups, GROUP_SIZE, BLOCK),
            num_warps=8,
        )
    highest = maxima.amax(-1, keepdim=True)
    total = highest + (sums * (maxima - highest).exp()).sum(-1, keepdim=True).log()
    best = _best_ids(logits, group_maxima, min(num_top, vocab_size))
    ids = torch.cat((tokens.long()[:, None], best), 1)
    values = logits.gather(1, ids).float() - total
    return ids.int(), values, counts.sum(-1).int() + 1


def _best_ids(logits: Tensor, group_maxima: Tensor, num_top: int) -> Tensor:
    """Return the ids of each row's `num_top` largest logits, the largest first.

    They all lie in the `num_top` groups with the largest maxima, so only these are searched.
    """
    num_rows, vocab_size = logits.shape
    if group_maxima.shape[1] <= num_top:
        return logits.topk(num_top).indices
    groups = group_maxima.topk(num_top, sorted=False).indices
    members = torch.arange(GROUP_SIZE, device=logits.device)
    ids = (groups[:, :, None] * GROUP_SIZE + members).view(num_rows, -1)
    values = logits.gather(1, ids.clamp(max=vocab_size - 1))
    values = values.masked_fill_(ids >= vocab_size, -torch.inf)
    return ids.gather(1, values.topk(num_top).indices)


@triton.jit
def _blocks_kernel(  # type: ignore[no-untyped-def]
    maxima,
    sums,
    counts,
    group_maxima,
    logits,
    stride,
    tokens,
    vocab_size,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Summarize one block of a row.

    Store the largest logit, the sum of exp(logit - largest), the number of logits larger than the
    logit of the row's token, and the largest logit of each group.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    own = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    highest = tl.max(values, 0)
    weights = tl.exp(values - tl.where(highest == -float("inf"), 0.0, highest))
    index = row * tl.num_programs(1) + block
    tl.store(maxima + index, highest)
    tl.store(sums + index, tl.sum(weights, 0))
    tl.store(counts + index, tl.sum((values > own).to(tl.float32), 0))
    NUM_GROUPS: tl.constexpr = BLOCK // GROUP_SIZE
    groups = block * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
    group_max = tl.max(tl.reshape(values, (NUM_GROUPS, GROUP_SIZE)), 1)
    tl.store(group_maxima + row * num_groups + groups, group_max, mask=groups < num_groups)
