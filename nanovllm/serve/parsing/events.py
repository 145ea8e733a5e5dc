"""Content-block events: what the parser emits and every API renders, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "reasoning", "tool_call"]


@dataclass(frozen=True, slots=True)
class BlockStart:
    index: int  # of the block in its completion; the previous block has stopped
    kind: Kind
    call_id: str = ""
    name: str = ""  # of the called tool


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """A piece of a block; all pieces of a complete call together are a JSON object."""

    index: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class BlockStop:
    """The end of a block; an incomplete one was cut off, or is a call whose JSON is invalid."""

    index: int
    kind: Kind
    is_complete: bool = True


BlockEvent = BlockStart | BlockDelta | BlockStop
