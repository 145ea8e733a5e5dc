"""A process of ours as its parent sees it: how it starts, what it tells, how it ends."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nanovllm import errors
from nanovllm.errors import NanovllmError, WorkerError
from nanovllm.executor.channel import Channel, Kind, Message

# Not the user's script, which would run again in every child.
_BOOT = (
    "import sys; num = int(sys.argv[1]); numbers = map(int, sys.argv[2:2 + num]); "
    "sys.path[:] = sys.argv[2 + num:]; from {} import main; main(*numbers)"
)
PACKAGES = Path(errors.__file__).resolve().parents[1]  # where ours is, should the path be relative
FLAGS = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -I, -W ...
HEARTBEAT_TIMEOUT = 4.5  # seconds without a heartbeat, which a child sends every second
STOP_SECONDS = 2.0  # from asking a process to end to killing it
# Products for a number of rows that torch and oneDNN keep: each may take half a megabyte, and by
# themselves they keep 1,024. docs/cpu.md
KEPT_PRODUCTS = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}


@dataclass(frozen=True, slots=True)
class ChildProcess:
    name: str
    process: subprocess.Popen[bytes]
    channel: Channel


def start_child(module: str, name: str, *numbers: int) -> ChildProcess:
    """Start a process that runs `main(fd, parent_pid, *numbers)` of a module."""
    ours, theirs = socket.socketpair()
    with theirs:
        for end in (ours, theirs):
            end.setblocking(True)  # whatever socket.setdefaulttimeout says
        arguments = [str(number) for number in (theirs.fileno(), os.getpid(), *numbers)]
        command = [sys.executable, *FLAGS, "-c", _BOOT.format(module), str(len(arguments))]
        process = subprocess.Popen(
            [*command, *arguments, *sys.path, str(PACKAGES)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**KEPT_PRODUCTS, **os.environ},
            start_new_session=True,  # Ctrl-C at the terminal is for the parent alone
        )
    return ChildProcess(name, process, Channel(ours))


class Watchdog:
    """Detects a child process that is stopped, or whose step does not return.

    `heard` is called for every message, `waited` for every wait without one. Time in which this
    process itself did not run counts as one wait.
    """

    is_armed = False  # not while the child loads a model: imports may hold its GIL for long

    def __init__(self, name: str, pid: int, step_timeout: float, wait_seconds: float) -> None:
        self._name = f"{name} (process {pid})"
        self._step_timeout = step_timeout  # seconds; 0: no checks
        self._wait_seconds = wait_seconds
        self._silence = 0.0  # seconds since the last message

    def heard(self, message: Message) -> Failure | None:
        self._silence = 0.0
        if message.kind is not Kind.HEARTBEAT or not self._step_timeout:
            return None
        (seconds,) = struct.unpack("<d", message.body)
        if seconds <= self._step_timeout:
            return None
        return self._failure(f"did not return from a step for {seconds:.0f} s")

    def waited(self, seconds: float) -> Failure | None:
        if not self.is_armed or not self._step_timeout:
            return None
        self._silence += min(seconds, self._wait_seconds)
        if self._silence <= HEARTBEAT_TIMEOUT:
            return None
        return self._failure(f"sent no heartbeat for {HEARTBEAT_TIMEOUT:.1f} s")

    def _failure(self, what: str) -> Failure:
        return Failure(f"{self._name} {what}", "WorkerError")


class Named(Protocol):
    @property
    def name(self) -> str:
        """What errors call it."""


def hear(child: Named, message: Message) -> Failure | None:
    """Log a child's log record; return the failure that it reports."""
    if message.kind is Kind.HEARTBEAT:
        return None
    entry = json.loads(message.body)
    if message.kind is Kind.LOG:
        logging.getLogger(entry["name"]).log(entry["level"], "%s", entry["message"])
        return None
    type_name, text = entry["type"], entry["message"].strip()
    if not hasattr(errors, type_name):
        parts = f"{child.name} failed", type_name, text.partition("\n")[0]
        text = ": ".join(filter(None, parts))  # the whole message is in the traceback
    return Failure(text or type_name, type_name, entry["traceback"], entry["time"])


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine can do no more, as text: an exception would hold on to all that it passed."""

    message: str
    type_name: str
    traceback: str = ""
    time: float = 0.0  # a death is always before the errors that it causes

    def error(self) -> NanovllmError:
        """Make what a caller gets: an error of ours as it was, any other with its traceback."""
        kind: type[NanovllmError] | None = getattr(errors, self.type_name, None)
        if kind is None:
            return WorkerError(f"{self.message}\n{self.traceback}")
        error = kind(self.message)
        error.__cause__ = WorkerError(self.traceback) if self.traceback else None
        return error


def death(child: ChildProcess) -> Failure:
    try:
        code = child.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        cause = "closed its connection"
    else:
        cause = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    message = f"{child.name} (process {child.process.pid}) {cause}; its stderr may say why"
    return Failure(message, "WorkerError")


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes, by force those that do not go when asked."""
    for ask in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for process in processes:
            ask(process)
        deadline = time.monotonic() + STOP_SECONDS
        if all(has_ended(process, deadline) for process in processes):
            return


def has_ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True
