"""The loop of a thread that runs an engine core."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue


def run_loop(
    commands: SimpleQueue[Callable[[], object] | None],
    step: Callable[[], object],
    wait_seconds: Callable[[], float | None],
) -> None:
    """Run all queued commands before each step; the command None ends the loop.

    `wait_seconds` says how long to wait for a command before the next step: 0 while a step is due,
    None if only a command can change anything.
    """
    while True:
        try:
            command = commands.get(timeout=wait_seconds())
        except Empty:
            step()
            continue
        if command is None:
            return
        command()
