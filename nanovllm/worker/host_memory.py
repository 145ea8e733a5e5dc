"""Allocate host memory, and measure it within the limits of this process's cgroups."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

GIB = 1 << 30


def allocate_lazily(num_bytes: int) -> Tensor:
    """Return zeroed memory without touching its pages; torch.zeros would write all of them."""
    if sys.platform != "linux":
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Each layer writes keys and values to separate regions. With huge pages, the first token would
    # allocate 2 MiB per region, and reads would be no faster.
    with suppress(OSError):  # the kernel may not support huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def trim_malloc() -> None:
    """Return freed memory from malloc to the operating system."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def total_memory() -> int:
    """Return the machine's memory in bytes, or the limit of this process's cgroups if lower."""
    limits = (_read_int(limit_file) for limit_file, _ in _cgroup_files())
    return min([_meminfo("MemTotal"), *(limit for limit in limits if limit is not None)])


def available_memory() -> int:
    """Return the bytes that this process may still allocate, within the limits of its cgroups."""
    available = _meminfo("MemAvailable")
    for limit_file, usage_file in _cgroup_files():
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            usage -= _page_cache(usage_file.parent)
            available = min(available, max(limit - usage, 0))
    return available


_OWN_GROUPS = Path("/proc/self/cgroup")
# Keyed by the name of the controller, which is empty in cgroup v2.
_CGROUPS = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def _cgroup_files() -> list[tuple[Path, Path]]:
    """Return the limit and usage files of this process's cgroup and of its ancestors."""
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
    """Return the total memory of a machine without /proc/meminfo, where free memory is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows: assume 8 GiB
        return 8 * GIB


def _page_cache(cgroup: Path) -> int:
    """Return the bytes of page cache that count as used, but that the kernel can reclaim."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split() for line in lines)
    return int(fields.get("inactive_file", 0))


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # the controller is absent, or the limit is "max"
        return None
