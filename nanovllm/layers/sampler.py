"""Sampling a whole batch with mixed parameters: temperature, top_k, top_p, min_p, greedy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.sampling_params import NO_TOKEN

NUM_CANDIDATES = 1024  # enough for nearly every top_k / top_p cut; the rest sorts the vocabulary


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """One entry per row."""

    temperature: Tensor
    top_k: Tensor  # 0: no limit
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor  # of the token being sampled

    def select(self, rows: Tensor) -> SamplingColumns:
        return SamplingColumns(*(getattr(self, name)[rows] for name in self.__slots__))


def sample(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Return one token per row of logits [rows, vocab_size]; ties go to the lowest id.

    A row with NaN or infinity, or without any token that may be chosen, gets NO_TOKEN.
    """
    peaks, tokens = logits.max(-1)  # several times faster than argmax on a CPU
    rows = columns.temperature.nonzero().squeeze(1)
    if len(rows):
        chosen = columns.select(rows)
        tokens[rows] = _draw(sampling_probs(logits[rows], chosen), chosen)
    return torch.where(peaks.isfinite(), tokens, NO_TOKEN)


def sampling_probs(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Return what each row is drawn from, not normalised; excluded tokens are exactly 0.

    Cuts are by value, so tokens that tie with the last one kept are kept too.
    """
    logits = logits.float()
    shifted = logits - logits.amax(-1, keepdim=True)  # before the division: no inf - inf
    probs = torch.softmax(shifted / columns.temperature[:, None], dim=-1)
    rows = ((columns.top_k > 0) | (columns.top_p < 1)).nonzero().squeeze(1)
    floor = columns.min_p * probs.amax(-1)
    if len(rows):
        cut = _top_floor(probs[rows], columns.top_k[rows], columns.top_p[rows])
        floor[rows] = torch.maximum(floor[rows], cut)
    return probs.masked_fill_(probs < floor[:, None], 0.0)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A float64 in [0, 1) that depends on nothing but seed and position (splitmix64)."""
    bits = seed + (position + 1) * -0x61C8864680B583EB
    bits = (bits ^ _shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    bits = bits ^ _shift_right(bits, 31)
    return _shift_right(bits, 11).double() * 2.0**-53


def _draw(probs: Tensor, columns: SamplingColumns) -> Tensor:
    """Invert the cumulative distribution at one uniform number per row."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    target = uniform(columns.seed, columns.position)[:, None] * cumulative[:, -1:]
    # right=True: the first token to exceed the target, so never one of probability 0.
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return tokens.clamp_(max=probs.shape[-1] - 1)  # logits without a distribution, such as NaN


def _top_floor(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest probability that top_k, then top_p on the rest, keep in each row."""
    vocab_size = probs.shape[-1]
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size).long()
    if vocab_size > NUM_CANDIDATES:
        top = probs.topk(NUM_CANDIDATES, dim=-1).values
        if bool(_is_cut_inside(top, top_k, top_p, vocab_size).all()):
            return _floor_of_sorted(top, top_k, top_p, vocab_size)
    ordered = probs.sort(dim=-1, descending=True).values
    return _floor_of_sorted(ordered, top_k, top_p, vocab_size)


def _is_cut_inside(top: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int) -> Tensor:
    """Whether the candidates show where each row is cut, ties included."""
    size, last = top.shape[-1], top[:, -1]
    k_floor = top.gather(-1, top_k.clamp(max=size)[:, None] - 1).squeeze(1)
    is_k_inside = (top_k <= size) & (k_floor > last)
    is_p_inside = (top_k == vocab_size) & (top_p < 1) & (top.sum(-1) >= top_p)
    return is_k_inside | is_p_inside | (last == 0)


def _floor_of_sorted(top: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int) -> Tensor:
    """`top` holds each row's largest probabilities, descending, at least as far as the cut."""
    size = top.shape[-1]
    k_floor = top.gather(-1, top_k.clamp(max=size)[:, None] - 1)
    kept = torch.where((top_k[:, None] > size) | (top >= k_floor), top, 0.0).double()
    total = torch.where(top_k == vocab_size, 1.0, kept.sum(-1))
    limit = torch.where(top_p < 1, top_p * total, torch.inf)
    # The token that crosses the threshold is kept: what counts is the mass before it.
    mass_before = kept.cumsum(-1) - kept
    num_kept = ((mass_before < limit[:, None]) & (kept > 0)).sum(-1)
    return top.gather(-1, num_kept.clamp(min=1)[:, None] - 1).squeeze(1)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)
