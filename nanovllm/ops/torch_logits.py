"""Token bitmasks and logprobs in plain torch: operations on logits before and after sampling."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_A_TIME = 64


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and logprobs of each row's given token and top tokens, and the given token's rank.

    Ids and logprobs are [rows, 1 + num_top], the given token first. Ranks [rows] count from 1. Only
    a few rows are upcast at a time, which bounds the memory.
    """
    num_top = min(num_top, logits.shape[1])
    parts = []
    for few, own in zip(logits.split(ROWS_AT_A_TIME), tokens.split(ROWS_AT_A_TIME), strict=True):
        wide, own = few.float(), own.long()[:, None]
        value = wide.gather(1, own)
        best = wide.topk(num_top, dim=-1)
        values = torch.cat((value, best.values), 1) - wide.logsumexp(-1, keepdim=True)
        ids = torch.cat((own, best.indices), 1).int()
        parts.append((ids, values, (wide > value).sum(-1, dtype=torch.int32) + 1))
    ids, values, ranks = (torch.cat(part) for part in zip(*parts, strict=True))
    return ids, values, ranks


def apply_token_bitmask(logits: Tensor, rows: Tensor | None, words: Tensor) -> None:
    """Set logits to minus infinity, in place, where the bitmask has a 0.

    words is int32 [masks, ceil(vocab_size / 32)]; bit i % 32 of word i // 32 is for token i.
    rows [masks] gives the row of each mask; None: one mask per row, in order.
    """
    # The table maps each byte to eight booleans, stored as one int64.
    every = torch.arange(256, device=logits.device)[:, None]
    table = (every >> torch.arange(8, device=logits.device) & 1 == 0).view(torch.int64).flatten()
    octets = words.view(torch.uint8).int()
    is_forbidden = table.index_select(0, octets.flatten()).view(torch.bool)
    is_forbidden = is_forbidden.view(len(words), -1)[:, : logits.shape[1]]
    if rows is None:
        logits.masked_fill_(is_forbidden, -torch.inf)
    else:
        masked = logits.index_select(0, rows).masked_fill_(is_forbidden, -torch.inf)
        logits.index_copy_(0, rows, masked)
