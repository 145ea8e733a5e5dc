"""Programmatic dependent launch: a kernel starts while the one before it still runs.

A kernel compiled with OVERLAP may read weights before it waits for its inputs, and what was written
before the kernel ahead of it stopped waiting: that lets this one start only then. So are the step's
first kernels, because the embedding, which is not launched like this, lies between.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 256  # with more, the libraries' products take so long that starting early gains nothing


def launch_options(x: Tensor, num_rows: int) -> dict[str, Any]:
    """What to launch a kernel with that takes OVERLAP and works on x; Hopper and later can."""
    is_few = x.is_cuda and num_rows <= MAX_ROWS
    if not is_few or torch.cuda.get_device_capability(x.device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernel before this one, then let the one after it start.

    Not the other way round: programs that start two kernels early find the processors unevenly
    occupied, and stay where they were placed.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_lines(places):  # type: ignore[no-untyped-def]
    """Ask L2 for the cache lines at some places."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [places.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
