"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

Every kernel that takes OVERLAP calls `wait_for_inputs` once. Before that call it may read

- weights, which no kernel writes;
- what was written two or more kernels ahead: the kernel before this one let it start only after
  its own wait, when everything ahead of that kernel had ended. The inputs of a step (positions,
  cache offsets) are such: the embedding, a kernel without PDL, comes between them and the layers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 256  # with more, kernels take so long that starting early gains nothing


def launch_options(x: Tensor, num_rows: int) -> dict[str, Any]:
    """Keyword arguments to launch a kernel that takes OVERLAP; only Hopper and later have PDL."""
    is_few = x.is_cuda and num_rows <= MAX_ROWS
    if not is_few or torch.cuda.get_device_capability(x.device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernel before this one has ended, then let the one after it start.

    Started before the wait, the next kernel's programs would be placed while two kernels occupy
    the processors, which is uneven, and they cannot move afterwards.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Start to load the cache lines of some addresses into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
