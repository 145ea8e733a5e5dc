"""Programmatic dependent launch: a kernel starts while the one before it still runs.

A kernel compiled with OVERLAP lets its successor start at once (gdc_launch_dependents) and waits
for its predecessors (gdc_wait) before it touches anything they read or write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch_options(x: Tensor) -> dict[str, Any]:
    """What to launch a kernel with that takes OVERLAP and works on x; Hopper and later can.

    Only for one row, where all kernels are ours: between cuBLAS's products it gains nothing.
    """
    if not x.is_cuda or len(x) > 1 or torch.cuda.get_device_capability(x.device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
