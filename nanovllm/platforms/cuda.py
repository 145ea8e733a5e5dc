"""One CUDA device: KV sizing by a profiled step, asynchronous copies, graphs."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.errors import ConfigError

logger = logging.getLogger(__name__)

GIB = 1 << 30
GRAPH_RESERVE = GIB // 2  # what capturing graphs takes beyond their buffers


def has_cuda() -> bool:
    """Whether there is an NVIDIA device and what compiles kernels for it."""
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return is_nvidia and importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class FetchedTokens:
    tokens: Tensor  # pinned
    arrived: torch.cuda.Event

    def result(self) -> np.ndarray:
        self.arrived.synchronize()
        array: np.ndarray = self.tokens.numpy()
        return array


class CudaPlatform:
    """All work is queued on one stream, in order: that is what makes reuse of blocks safe."""

    depth = 1
    name = "cuda"

    def __init__(self, gpu_memory_utilization: float) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.num_processors = properties.multi_processor_count
        self.utilization = gpu_memory_utilization
        self._step_bytes = 0
        self._graph_pool = torch.cuda.graph_pool_handle()

    def choose_dtype(self, checkpoint_dtype: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, checkpoint_dtype)
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.float16
        return dtype

    def profile(self, run: Callable[[], object]) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        self._step_bytes = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()

    def cache_bytes(self, wanted: int) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        budget = int(total * self.utilization)
        room = budget - (total - free) - self._step_bytes - GRAPH_RESERVE
        account = (
            f"{total / GIB:.1f} GiB x gpu_memory_utilization {self.utilization} = "
            f"{budget / GIB:.1f}, of which weights and other processes hold "
            f"{(total - free) / GIB:.1f}, a step needs {self._step_bytes / GIB:.1f}, "
            f"graphs {GRAPH_RESERVE / GIB:.1f}"
        )
        if room <= 0:
            raise ConfigError(
                f"no GPU memory is left for the KV cache: {account}; raise "
                "gpu_memory_utilization, stop other processes, or lower max_num_batched_tokens"
            )
        granted = min(wanted, room)
        logger.info("KV cache: %.2f GiB (%s)", granted / GIB, account)
        return granted

    def allocate_cache(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def has_room_for_copy(self, num_bytes: int) -> bool:
        return False

    def upload(self, array: np.ndarray) -> Tensor:
        # Pinned memory that is freed is not handed out again before the copies from it are done.
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def fetch(self, tokens: Tensor) -> FetchedTokens:
        pinned = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        pinned.copy_(tokens, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return FetchedTokens(pinned, arrived)

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture work that uses fixed buffers; return what repeats it, and its output."""
        run()  # compile and allocate what is made on first use
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            output = run()
        return graph.replay, output
