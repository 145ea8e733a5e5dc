"""Programmatic dependent launch (PDL): a kernel starts while the previous one still runs.

Every kernel that takes OVERLAP calls `wait_for_inputs` once. Before that call it may read

- weights, which no kernel writes;
- outputs of kernels at least two launches earlier: the previous kernel allowed this one to start
  only after its own wait, when all earlier kernels had finished. The inputs of a step (positions,
  slot_mapping) qualify: the embedding, a kernel without PDL, runs between them and the layers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 256  # with more rows, kernels take so long that starting early gains nothing


def launch_options(x: Tensor, num_rows: int) -> dict[str, Any]:
    """Return launch arguments for a kernel that takes OVERLAP; PDL needs Hopper or later."""
    is_few = x.is_cuda and num_rows <= MAX_ROWS
    if not is_few or torch.cuda.get_device_capability(x.device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the previous kernel has finished, then allow the next kernel to start.

    If the next kernel started before the wait, its CTAs would be placed while two kernels occupy
    the SMs. That placement is uneven, and CTAs cannot move afterwards.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Prefetch the cache lines at the given addresses into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
