"""The CPU: a dtype by its features, a lazily touched KV pool."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.pending import Pending
from nanovllm.platforms.base import Memory
from nanovllm.platforms.cpu_features import CpuFeatures, find_cpu_features

logger = logging.getLogger(__name__)

GIB = 1 << 30


class CpuPlatform:
    """Runs each step inside `submit`, so a pipeline deeper than 0 would only delay results."""

    device = torch.device("cpu")
    depth = 0  # benchmarks/engine/cpu_choices.py
    name = device_name = "cpu"

    def __init__(self, num_ranks: int = 1, features: CpuFeatures | None = None) -> None:
        self.num_ranks = num_ranks  # that share this machine's memory
        self.features = features or find_cpu_features()

    def in_order(self) -> AbstractContextManager[object]:
        return nullcontext()

    def check_fp8(self, head_dim: int) -> None: ...

    def choose_dtype(self, checkpoint_dtype: str) -> torch.dtype:
        return self.features.choose_dtype(checkpoint_dtype)

    def reads_blocks(self, dtype: torch.dtype) -> bool:
        return self.features.runs_kernels(dtype)

    def reads_codes(self, kind: str, dtype: torch.dtype) -> bool:
        return False

    def memory(self) -> Memory:
        return Memory(available_memory() // self.num_ranks, total_memory() // self.num_ranks)

    def profile(self, run: Callable[[], object]) -> None:
        pass  # a step's activations are small beside the memory that is left free

    def cache_bytes(self, wanted: int) -> int:
        share = available_memory() // 4 // self.num_ranks
        granted = min(wanted, share)
        logger.info(
            "KV cache: %.2f GiB (every sequence at full length: %.2f, a quarter of memory%s: %.2f)",
            granted / GIB,
            wanted / GIB,
            "" if self.num_ranks == 1 else f" over {self.num_ranks} ranks",
            share / GIB,
        )
        return granted

    def check_cache_bytes(self, num_bytes: int) -> None:
        pass  # memory is taken as it is used

    def allocate_cache(self, num_bytes: int) -> Tensor:
        # Zero pages, none of them touched; torch.zeros would write every one.
        if sys.platform != "linux":
            return torch.from_numpy(np.zeros(num_bytes, np.uint8))
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Every layer writes its keys and its values to places of their own: of pages of 2 MiB the
        # first token would take one for each, and they are read no faster.
        with suppress(OSError):  # a kernel without such pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def fill(self, target: Tensor, rows: Tensor) -> None:
        target.copy_(rows)

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def host_memory(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return np.empty(shape, np.int32)

    def is_readable(self, array: np.ndarray) -> bool:
        return True

    def readable(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def fetch(self, *tensors: Tensor) -> Pending[list[np.ndarray]]:
        return Pending(lambda: [tensor.numpy() for tensor in tensors])

    def release(self) -> None:
        give_back()

    def has_room_for_copy(self, num_bytes: int) -> bool:
        # By the memory there is, not by what is free: answers must not change between runs.
        return num_bytes * self.num_ranks <= total_memory() // 8


def give_back() -> None:
    """Return freed memory that malloc still holds to the system."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def total_memory() -> int:
    """Return the bytes of the machine, or of its cgroup if that is allowed less."""
    limits = (_read_int(limit_file) for limit_file, _ in _cgroup_files())
    return min([_meminfo("MemTotal"), *(limit for limit in limits if limit is not None)])


def available_memory() -> int:
    """Return the bytes this process may still take: the machine's or its cgroup's, if less."""
    available = _meminfo("MemAvailable")
    for limit_file, usage_file in _cgroup_files():
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            usage -= _page_cache(usage_file.parent)
            available = min(available, max(limit - usage, 0))
    return available


_OWN_GROUPS = Path("/proc/self/cgroup")
# By the name of the controller: version 2 has none.
_CGROUPS = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    "memory": (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ),
}


def _cgroup_files() -> list[tuple[Path, Path]]:
    """Return where limit and usage stand of the groups that this process is in, one in another."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return []
    entries = [line.split(":", 2) for line in lines]
    own = {name: path for _, names, path in entries for name in names.split(",")}
    files = []
    for controller, (root, limit, usage) in _CGROUPS.items():
        folder = root / own.get(controller, "").lstrip("/")
        groups = [folder, *folder.parents][: len(folder.parts) - len(root.parts) + 1]
        files += [(group / limit, group / usage) for group in groups]
    return files


def _meminfo(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return _physical_memory()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[name].split()[0]) * 1024


def _physical_memory() -> int:
    """Return the bytes of a machine that is not Linux; what of them is free is not known there."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows
        return 8 * GIB


def _page_cache(cgroup: Path) -> int:
    """Return the bytes counted as used that the kernel gives back on demand."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split() for line in lines)
    return int(fields.get("inactive_file", 0))


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such controller, or "max"
        return None
