"""Ctrl-C as a flag that is looked at between steps, and a word on the screen at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def ctrl_c_flag() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a flag: an exception could strike in the middle of an engine step.

    A second Ctrl-C raises KeyboardInterrupt after all, should the engine not get to look.
    """
    is_pressed = False

    def on_ctrl_c(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        with _acknowledged():
            yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _acknowledged() -> Iterator[None]:
    """Say at once that Ctrl-C was heard.

    Python's handlers run in the main thread, which may be deep in a long step. The system's own
    handler writes the signal's number into a pipe whatever that thread does.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_acknowledge, args=(reader,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


def _acknowledge(reader: int) -> None:
    while number := os.read(reader, 1):
        if number[0] == signal.SIGINT:
            print(" [stopping ...]", file=sys.stderr, flush=True)
            return
