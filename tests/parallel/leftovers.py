"""Detects leaked children, file descriptors, threads and shared files of a process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class Leftovers:
    """A record of existing resources; temporary files are searched in a private folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = snapshot(folder)

    def check(self, *, but_fds: bool = False, seconds: float = 60.0) -> None:
        """Fail unless all new resources are gone soon; `but_fds` skips descriptors and threads."""
        kinds = [kind for kind in self._before if not (but_fds and kind in ("fds", "threads"))]
        wait_until(lambda: not self._new(kinds), seconds, lambda: f"left: {self._new(kinds)}")

    def _new(self, kinds: list[str]) -> dict[str, set[str]]:
        now = snapshot(self._folder)
        new = {kind: now[kind] - self._before[kind] for kind in kinds}
        return {kind: names for kind, names in new.items() if names}


def snapshot(folder: Path) -> dict[str, set[str]]:
    return {
        "processes": descendants(os.getpid()),
        "fds": {f"{fd} {target(fd)}" for fd in os.listdir("/proc/self/fd") if target(fd)},
        "threads": {thread.name for thread in threading.enumerate()},
        # Of Python's own pools, which our workers are not: another test's, or another program's.
        "shared memory": {n for n in os.listdir("/dev/shm") if not n.startswith("sem.mp-")},
        "files": set(os.listdir(folder)),
    }


def target(fd: str) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the descriptor of the listing itself
        return None


def descendants(pid: int) -> set[str]:
    """Return all descendants of a process, including zombies."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        status = read_status(folder.name)
        if status is not None and status.parent == pid:
            found |= {folder.name, *descendants(int(folder.name))}
    return found


def is_alive(pid: int) -> bool:
    """Return False for zombies: the init process of a container may never reap orphans."""
    status = read_status(str(pid))
    return status is not None and status.state != "Z"


@dataclass(frozen=True)
class Status:
    state: str
    parent: int


def read_status(pid: str) -> Status | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Status(fields[0], int(fields[1]))


def wait_until(
    is_true: Callable[[], bool], seconds: float, describe: Callable[[], str] = lambda: ""
) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.01)
