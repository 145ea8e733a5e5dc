"""Sample a whole batch with mixed parameters, in plain torch: temperature, top_k, top_p, min_p.

`sampling_probs` defines the distribution that every device samples from. The CPU inverts the
cumulative distribution; the CUDA kernels add Gumbel noise and take the largest logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.ops.torch_top_k_top_p import top_k_top_p_threshold
from nanovllm.sampling_params import NO_TOKEN

# Constants of splitmix64, as signed integers, and of the noise in the CUDA kernels.
STEP, MIX_FIRST, MIX_SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
ID_FACTOR, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
LARGEST_UNIFORM = 1 - 2.0**-24
ROWS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters, one per slot or one per row."""

    temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int32; 0: no limit
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64

    def select(self, indices: Tensor) -> SamplingColumns:
        return SamplingColumns(*(getattr(self, name)[indices] for name in self.__slots__))


def sample(logits: Tensor, columns: SamplingColumns, positions: Tensor) -> Tensor:
    """Return one token per row of logits [rows, vocab_size]; ties go to the lowest id.

    `columns` holds each row's parameters, `positions` the position of its new token. A row that
    contains NaN or infinity, or has no allowed token, gets NO_TOKEN.
    """
    peaks, tokens = logits.max(-1)  # several times faster than argmax on a CPU
    rows = columns.temperature.nonzero().squeeze(1)
    if len(rows):
        chosen = columns.select(rows)
        numbers = uniform(chosen.seed, positions[rows])
        tokens[rows] = _draw(sampling_probs(logits[rows], chosen), numbers)
    return torch.where(peaks.isfinite(), tokens, NO_TOKEN)


def sampling_probs(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Return the unnormalized distribution of each row; excluded tokens are exactly 0.

    The cutoff is a probability, so tokens that tie with the last kept token are kept, too.
    """
    logits = logits.float()
    shifted = logits - logits.amax(-1, keepdim=True)  # before the division, to avoid inf - inf
    probs = torch.softmax(shifted / columns.temperature[:, None], dim=-1)
    rows = ((columns.top_k > 0) | (columns.top_p < 1)).nonzero().squeeze(1)
    threshold = columns.min_p * probs.amax(-1)
    if len(rows):
        cut = top_k_top_p_threshold(probs[rows], columns.top_k[rows], columns.top_p[rows])
        threshold[rows] = torch.maximum(threshold[rows], cut)
    return probs.masked_fill_(probs < threshold[:, None], 0.0)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprobs of one token per row of logits and of the row's top tokens, with ranks.

    Ids and logprobs are [rows, 1 + num_top], the given token first; ranks count from 1. Only a few
    rows are upcast at a time, which bounds the memory.
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
        kept = logits.index_select(0, rows).masked_fill_(is_forbidden, -torch.inf)
        logits.index_copy_(0, rows, kept)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Return a float64 in [0, 1) that depends only on seed and position (splitmix64)."""
    return _shift_right(_mix(seed + (position + 1) * STEP), 11).double() * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64, a bijection."""
    bits = (bits ^ _shift_right(bits, 30)) * MIX_FIRST
    bits = (bits ^ _shift_right(bits, 27)) * MIX_SECOND
    return bits ^ _shift_right(bits, 31)


def _draw(probs: Tensor, numbers: Tensor) -> Tensor:
    """Invert the cumulative distribution at one number in [0, 1) per row."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    target = numbers[:, None] * cumulative[:, -1:]
    # right=True finds the first token to exceed the target, so never one of probability 0.
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return tokens.clamp_(max=probs.shape[-1] - 1)  # out of range if a row has NaN


def _shift_right(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)
