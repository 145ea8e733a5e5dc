"""Floats in eight bits (e4m3), and the one rule by which numbers are rounded to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
SMALLEST_SCALE = 2.0**-126  # which zeros have: one over it is finite


@dataclass(frozen=True, slots=True)
class ScaledCodes:
    codes: Tensor  # FP8
    scales: Tensor  # float32


def round_to_codes(values: Tensor, largest: Tensor) -> ScaledCodes:
    """Round numbers to codes; `largest` has one number for each scale, and broadcasts."""
    # A tensor over a tensor: torch multiplies by one over a number, which may round differently.
    scales = largest / torch.full_like(largest, LARGEST_FP8)
    scales.clamp_(min=SMALLEST_SCALE)
    codes = (values * scales.reciprocal()).clamp_(-LARGEST_FP8, LARGEST_FP8)
    return ScaledCodes(codes.to(FP8), scales)


def round_rows(values: Tensor) -> ScaledCodes:
    """Round rows [rows, columns] of float32, each by its largest number."""
    return round_to_codes(values, values.abs().amax(1, keepdim=True))
