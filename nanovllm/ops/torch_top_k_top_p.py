"""The cutoff of top_k and top_p in plain torch: the smallest probability that remains."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_CANDIDATES = 1024  # usually enough for top_k and top_p; else the whole vocabulary is sorted


def top_k_top_p_threshold(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest probability in each row that remains after top_k, then top_p."""
    vocab_size = probs.shape[-1]
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size).long()
    if vocab_size > NUM_CANDIDATES:
        top = probs.topk(NUM_CANDIDATES, dim=-1).values
        if bool(_has_cutoff(top, top_k, top_p, vocab_size).all()):
            return _threshold_of_sorted(top, top_k, top_p, vocab_size)
    ordered = probs.sort(dim=-1, descending=True).values
    return _threshold_of_sorted(ordered, top_k, top_p, vocab_size)


def _has_cutoff(top: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int) -> Tensor:
    """Return whether the candidates are enough to find the cutoff, for each row."""
    size, last = top.shape[-1], top[:, -1]
    k_threshold = top.gather(-1, top_k.clamp(max=size)[:, None] - 1).squeeze(1)
    is_k_inside = (top_k <= size) & (k_threshold > last)
    is_p_inside = (top_k == vocab_size) & (top_p < 1) & (top.sum(-1) >= top_p)
    return is_k_inside | is_p_inside | (last == 0)


def _threshold_of_sorted(top: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int) -> Tensor:
    """Compute `top_k_top_p_threshold` from the largest probabilities, in descending order."""
    size = top.shape[-1]
    k_threshold = top.gather(-1, top_k.clamp(max=size)[:, None] - 1)
    kept = torch.where((top_k[:, None] > size) | (top >= k_threshold), top, 0.0).double()
    total = torch.where(top_k == vocab_size, 1.0, kept.sum(-1))
    limit = torch.where(top_p < 1, top_p * total, torch.inf)
    # The token that crosses the limit is kept, so compare the mass before each token.
    mass_before = kept.cumsum(-1) - kept
    num_kept = ((mass_before < limit[:, None]) & (kept > 0)).sum(-1)
    return top.gather(-1, num_kept.clamp(min=1)[:, None] - 1).squeeze(1)
