"""The memory of this machine, or of the cgroups that this process runs in."""

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
    """Return zero pages, none of them touched; torch.zeros would write every one."""
    if sys.platform != "linux":
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Every layer writes its keys and its values to places of their own: of pages of 2 MiB the
    # first token would take one for each, and they are read no faster.
    with suppress(OSError):  # a kernel without such pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


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
