"""Interrupts at every point where Python looks for signals, one after the other."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

# After these the interpreter looks whether a signal came; between others it does not.
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")


class InterruptAt:
    """While active, raise KeyboardInterrupt at the point with the given number, once.

    Counts the points in functions of this package alone, and of contextlib, in this thread.
    """

    def __init__(self, point: int | None = None) -> None:
        self.point = point
        self.num_points = 0
        self._previous: dict[int, str | None] = {}  # by frame: what it ran last

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if "/nanovllm/" not in name and not name.endswith("contextlib.py"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            previous = self._previous.get(id(frame))
            self._previous[id(frame)] = operations(frame.f_code)[frame.f_lasti]
            if previous is not None and previous.startswith(LOOKS):
                self.num_points += 1
                if self.num_points - 1 == self.point:
                    raise KeyboardInterrupt  # which also ends the tracing
            return self._trace
        self._previous[id(frame)] = None  # an exception goes straight to its handler
        # A function that returns to one in Python goes straight on there.
        if event == "return" and frame.f_back is not None and frame.f_code.co_name != "__init__":
            self._previous[id(frame.f_back)] = None
        return self._trace


@functools.cache
def operations(code: CodeType) -> dict[int, str]:
    return {each.offset: each.opname for each in dis.get_instructions(code)}
