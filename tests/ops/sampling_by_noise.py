"""The sampling of the CUDA kernels in plain torch: the largest logit after adding noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.ops.torch_sampling import (
    FIRST_FACTOR,
    ID_FACTOR,
    LARGEST_UNIFORM,
    SECOND_FACTOR,
    STEP,
    SamplingColumns,
    _mix,
    _shift_right,
    sampling_probs,
)
from nanovllm.sampling_params import NO_TOKEN


def sample_by_noise(logits: Tensor, columns: SamplingColumns, positions: Tensor) -> Tensor:
    """Return the token of each row's largest logit after adding noise, like the CUDA kernels."""
    rows = columns.temperature.nonzero().squeeze(1)
    scores = logits.float().clone()
    if len(rows):
        chosen = columns.select(rows)
        is_kept = sampling_probs(logits[rows], chosen) > 0
        noise = log_exponential(noise_bits(chosen.seed, positions[rows], logits.shape[1]))
        drawn = scores[rows] - math.log(2) * chosen.temperature[:, None] * noise
        scores[rows] = drawn.masked_fill(~is_kept, -torch.inf)
    tokens = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)  # the first of ties
    return torch.where(logits.amax(-1).isfinite(), tokens, NO_TOKEN)


def noise_bits(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Return 32 random bits for every token id, [rows, vocab_size], as int64."""
    key = _mix(_mix(seed + STEP) + position * STEP)[:, None]
    ids = torch.arange(vocab_size, device=seed.device)
    bits = (ids * ID_FACTOR + (key & 0xFFFFFFFF)) & 0xFFFFFFFF
    bits ^= bits >> 16
    bits = (bits * FIRST_FACTOR + _shift_right(key, 32)) & 0xFFFFFFFF
    bits ^= bits >> 15
    bits = (bits * SECOND_FACTOR) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def log_exponential(bits: Tensor) -> Tensor:
    """Return log2 of exponential noise, as `sample_by_noise` subtracts it."""
    uniform = (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=LARGEST_UNIFORM)
    return torch.log2(-math.log2(math.e) * torch.log1p(-uniform))
