"""One CUDA device: KV sizing by a profiled step, asynchronous copies, graphs."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.pending import Pending
from nanovllm.platforms.base import Memory

logger = logging.getLogger(__name__)

GIB = 1 << 30


def has_cuda() -> bool:
    """Whether there is an NVIDIA device and what compiles kernels for it."""
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return is_nvidia and importlib.util.find_spec("triton") is not None


def check_c_compiler() -> None:
    """Raise ConfigError where Triton could not build the launchers of its kernels."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        raise ConfigError(
            f"a GPU needs a C compiler for Triton, but {' or '.join(compilers)} is not "
            "on the path; install gcc (apt-get install gcc libc6-dev), set CC, or set device='cpu'"
        )


def num_devices() -> int:
    return torch.cuda.device_count()


def use_device(index: int) -> None:
    """Make a device the one that platforms made later work on."""
    torch.cuda.set_device(index)


def pin(array: np.ndarray) -> Tensor:
    """Copy an array to memory that is not handed out again before the copies from it are done."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    # Not by torch: its threads would take a large array apart, and spin for milliseconds after.
    pinned.numpy()[...] = source.numpy()
    return pinned


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """What a device's bytes are spoken for, and what is left for the KV cache."""

    total: int
    utilization: float
    held: int  # by weights and other processes
    step: int  # the largest step
    graphs: int

    @property
    def room(self) -> int:
        return int(self.total * self.utilization) - self.held - self.step - self.graphs

    def grant(self, wanted: int) -> int:
        """Return as many of the `wanted` bytes as there are; none at all is an error."""
        if self.room <= 0:
            raise ConfigError(
                f"no GPU memory is left for the KV cache: {self}; raise "
                "gpu_memory_utilization, stop other processes, or lower max_num_batched_tokens"
            )
        return min(wanted, self.room)

    def check(self, num_bytes: int) -> None:
        """Refuse a KV cache that was asked for by number, whatever the share, and does not fit."""
        whole = replace(self, utilization=1.0)
        if num_bytes > whole.room:
            raise ConfigError(
                f"num_kvcache_blocks asks for {num_bytes / GIB:.2f} GiB, but "
                f"{max(whole.room, 0) / GIB:.2f} are left: {whole}; lower num_kvcache_blocks or "
                "max_num_batched_tokens, or stop other processes"
            )

    def __str__(self) -> str:
        total, held, step, graphs = (
            f"{num_bytes / GIB:.1f}"
            for num_bytes in (self.total, self.held, self.step, self.graphs)
        )
        share = ""
        if self.utilization < 1:
            budget = self.total * self.utilization / GIB
            share = f" x gpu_memory_utilization {self.utilization} = {budget:.1f}"
        return (
            f"{total} GiB{share}, of which weights and other processes hold {held}, "
            f"a step needs {step}, graphs {graphs}"
        )


@dataclass(frozen=True)
class DeviceMemory:
    """A place on a CUDA device, as torch and other libraries tell each other of one."""

    __cuda_array_interface__: dict[str, Any]


class CudaPlatform:
    """All work is queued on one stream, in order: that is what makes reuse of blocks safe."""

    depth = 1
    name = "cuda"

    def __init__(self, gpu_memory_utilization: float) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.device_name = torch.cuda.get_device_name(self.device)
        self.utilization = gpu_memory_utilization
        self._stream = torch.cuda.default_stream(self.device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._capture_stream = torch.cuda.Stream(self.device)
        self._step_bytes = self._graph_bytes = 0
        self._graph_share = 0.0

    def in_order(self) -> AbstractContextManager[object]:
        """Make the device and its stream current, whatever the calling thread works with."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def choose_dtype(self, checkpoint_dtype: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, checkpoint_dtype)
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.float16
        return dtype

    def reads_blocks(self, dtype: torch.dtype) -> bool:
        return False

    def reads_codes(self, kind: str, dtype: torch.dtype) -> bool:
        capability = torch.cuda.get_device_capability(self.device)
        has_kernel = capability >= ((8, 9) if kind == "fp8" else (8, 0))
        return has_kernel and dtype in (torch.bfloat16, torch.float16)

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return Memory(free + unused, total)

    def profile(self, run: Callable[[], object]) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        self._step_bytes = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()

    def reserve_for_graphs(self, num_bytes: int, step_share: float) -> None:
        """Keep the KV cache from taking what graphs will need: that, and a share of a step's."""
        self._graph_bytes, self._graph_share = num_bytes, step_share

    def cache_bytes(self, wanted: int) -> int:
        account = self._account()
        granted = account.grant(wanted)
        logger.info("KV cache: %.2f GiB (%s)", granted / GIB, account)
        return granted

    def check_fp8(self, head_dim: int) -> None:
        """Refuse a KV cache of eight bits where no instruction widens it, or multiplies a head."""
        if head_dim <= 16:
            raise ConfigError(
                f"kv_cache_dtype='fp8' is not there on GPUs for heads of {head_dim}; leave it out"
            )
        capability = torch.cuda.get_device_capability(self.device)
        if capability < (8, 9):
            raise ConfigError(
                "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or later, and "
                f"{self.device_name} has {capability[0]}.{capability[1]}; leave it out"
            )

    def check_cache_bytes(self, num_bytes: int) -> None:
        self._account().check(num_bytes)

    def allocate_cache(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def has_room_for_copy(self, num_bytes: int) -> bool:
        return False

    def fill(self, target: Tensor, rows: Tensor) -> None:
        with self.in_order():
            pinned = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
            # A copy straight from the file's pages would be staged by one thread of the driver.
            pinned.copy_(rows)
            target.copy_(pinned, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()  # before pinned is freed and handed out again

    def upload(self, array: np.ndarray) -> Tensor:
        return pin(array).to(self.device, non_blocking=True)

    def send(self, array: np.ndarray, target: Tensor) -> None:
        """Copy an array to the beginning of a tensor, without waiting."""
        target[: len(array)].copy_(pin(array), non_blocking=True)

    def host_memory(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        memory: npt.NDArray[np.int32] = torch.empty(
            shape, dtype=torch.int32, pin_memory=True
        ).numpy()
        return memory

    def is_readable(self, array: np.ndarray) -> bool:
        return torch.from_numpy(array).is_pinned()

    def readable(self, array: np.ndarray) -> Tensor:
        """Pinned memory as it is: a kernel reads it once, in the time that a copy would take."""
        return torch.from_numpy(array) if self.is_readable(array) else self.upload(array)

    def fetch(self, *tensors: Tensor) -> Pending[list[np.ndarray]]:
        """What is not on the device is memory of the host that queued work will have written."""
        pinned = [self.pinned(t) if t.is_cuda else t for t in tensors]
        for target, tensor in zip(pinned, tensors, strict=True):
            if target is not tensor:
                target.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> list[np.ndarray]:
            arrived.synchronize()
            pairs = zip(pinned, tensors, strict=True)
            return [mine.numpy() if mine is not t else t.numpy().copy() for mine, t in pairs]

        return Pending(wait)

    def pinned(self, like: Tensor) -> Tensor:
        """Return memory of the host that the device can write to."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def release(self) -> None:
        torch.cuda.synchronize(self.device)
        torch._C._cuda_clearCublasWorkspaces()  # one per stream, and the capture stream is gone
        torch.cuda.empty_cache()

    def record(
        self, run: Callable[[], Tensor], is_loaded: bool = False
    ) -> tuple[Callable[[], None], Tensor]:
        """Capture work that uses fixed buffers; return what repeats it, and its output.

        It runs once before, unless its kernels are loaded. All graphs share a pool: memory that
        the output gives up when it goes out of use serves the graphs that are recorded later. The
        pool lasts as long as any of its graphs.
        """
        if not is_loaded:
            run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which empties the allocator's caches before each of many captures.
        with torch.cuda.stream(self._capture_stream):
            # Other threads may use the device meanwhile: an error is theirs only if they capture.
            graph.capture_begin(self._graph_pool, capture_error_mode="thread_local")
            try:
                output = run()
            finally:
                graph.capture_end()
        return graph.replay, output

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return the same memory as a tensor that does not keep it from being handed out again."""
        assert tensor.is_contiguous()
        place = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",  # the interface has no bfloat16
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }
        return torch.as_tensor(DeviceMemory(place), device=self.device).view(tensor.dtype)

    def _account(self) -> MemoryAccount:
        free, total = torch.cuda.mem_get_info(self.device)
        graphs = self._graph_bytes + int(self._graph_share * self._step_bytes)
        return MemoryAccount(total, self.utilization, total - free, self._step_bytes, graphs)
