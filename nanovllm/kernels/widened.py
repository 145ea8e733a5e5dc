"""Products in a wider dtype than the weights have, for CPUs that only emulate those of theirs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Of a weight, at a time: large enough for the product's speed, small beside any model.
PIECE_SIZE = 1 << 21

# So few rows of float16 are faster as they are, even emulated: benchmarks/engine/cpu_choices.py.
MAX_NARROW_ROWS = {torch.float16: 4, torch.bfloat16: 0}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """F.linear in `dtype` (None: as it comes), rounded once; no wide copy of a weight is kept."""
    if dtype is None or dtype == x.dtype or len(x) <= MAX_NARROW_ROWS[x.dtype]:
        return F.linear(x, weight, bias)
    num_out, num_in = weight.shape
    wide = x.to(dtype)
    y = x.new_empty(len(x), num_out)
    num_rows = max(PIECE_SIZE // max(num_in, 1), 1)
    for first in range(0, num_out, num_rows):
        part = slice(first, first + num_rows)
        part_bias = None if bias is None else bias[part].to(dtype)
        y[:, part] = F.linear(wide, weight[part].to(dtype), part_bias)
    return y


def widen(*tensors: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)
