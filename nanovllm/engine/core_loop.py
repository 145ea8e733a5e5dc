"""The loop of the thread that runs an engine core: commands between steps."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def run_loop(
    inbox: SimpleQueue[T | None],
    handle: Callable[[T], object],
    step: Callable[[], object],
    wait_seconds: Callable[[], float | None],
) -> None:
    """Handle all commands in the inbox before each step; the command None ends the loop.

    `wait_seconds` says how long to wait for a command before the next step: 0 while a step is due,
    None while only a command can change anything.
    """
    while True:
        try:
            command = inbox.get(timeout=wait_seconds())
        except Empty:
            step()
            continue
        if command is None:
            return
        handle(command)
