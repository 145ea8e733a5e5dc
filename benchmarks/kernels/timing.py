"""Time work on a GPU as a graph: nothing is launched, and the device never waits for the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from nanovllm.platforms.cuda import CudaPlatform

NUM_REPLAYS = 10


def microseconds(run: Callable[[], Tensor], platform: CudaPlatform) -> float:
    """Median time of a replay; the first one does not count."""
    replay, _ = platform.record(run)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPLAYS + 2)]
    events[0].record()
    for event in events[1:]:  # queued at once
        replay()
        event.record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(a.elapsed_time(b) for a, b in pairwise(events[1:]))
