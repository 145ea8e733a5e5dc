"""CUDA graphs that share memory: only the output of the last replayed graph is valid."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor


class Graph(NamedTuple):
    """A captured function; the next replay of any graph may overwrite its output."""

    replay: Callable[[], None]
    output: Tensor  # does not keep its memory allocated


class GraphPool:
    """Captures graphs; each one reuses the memory of those captured before it.

    So the largest graph should be captured first. The memory lives as long as any of the graphs.
    """

    def __init__(self, device: torch.device, has_kernels: bool) -> None:
        self.device = device
        self.has_kernels = has_kernels  # whether all kernels are loaded before the first capture
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        """Capture `run`, which must use fixed buffers and return a contiguous tensor.

        Unless all kernels are loaded, `run` is first called once without capture. If it uses the
        output of another graph, it must not allocate memory, which could overlap that output.
        """
        if not self.has_kernels:
            run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph is not used: it would empty the allocator's cache before every capture.
        with torch.cuda.stream(self._stream):
            # thread_local: other threads may use the device during the capture.
            graph.capture_begin(self._memory, capture_error_mode="thread_local")
            try:
                output = run()
            finally:
                graph.capture_end()
        return Graph(graph.replay, weak_ref(output))


def weak_ref(tensor: Tensor) -> Tensor:
    """Return a tensor that aliases the same memory, but does not keep it allocated."""
    assert tensor.is_contiguous()
    memory = {
        "shape": tuple(tensor.shape),
        "typestr": f"<i{tensor.itemsize}",  # integers, because the interface lacks bfloat16
        "data": (tensor.data_ptr(), False),
        "version": 2,
    }
    described = SimpleNamespace(__cuda_array_interface__=memory)
    return torch.as_tensor(described, device=tensor.device).view(tensor.dtype)
