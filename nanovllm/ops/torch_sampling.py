"""Sample a batch in plain torch; each row has its own temperature, top_k, top_p and min_p.

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
    """Return one token per row of logits [rows, vocab_size]; greedy ties go to the lowest id.

    `columns` holds each row's parameters, `positions` the position of its new token. A row that
    contains NaN or +inf, or whose tokens are all masked, gets NO_TOKEN.
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

    The cutoff is a probability, so tokens as probable as the last kept one are kept, too.
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
    # right=True finds the first token whose cumulative probability exceeds the target; its own
    # probability is never 0.
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return tokens.clamp_(max=probs.shape[-1] - 1)  # if a row has NaN, the index is out of range


def _shift_right(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)
