"""The gated activation of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up, where x holds gate and up side by side."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
