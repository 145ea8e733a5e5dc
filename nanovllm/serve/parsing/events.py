"""Content-block events: the parser emits them in text order, and each chat API renders them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "reasoning", "tool_call"]


@dataclass(frozen=True, slots=True)
class BlockStart:
    """The start of a content block; the previous block, if any, has stopped."""

    index: int  # position of the content block in its completion
    kind: Kind
    call_id: str = ""
    name: str = ""  # name of the called tool


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """New text of a content block; the deltas of a complete tool call form a JSON object."""

    index: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class BlockStop:
    """The end of a content block; incomplete if it was cut off or its JSON is invalid."""

    index: int
    kind: Kind
    is_complete: bool = True


BlockEvent = BlockStart | BlockDelta | BlockStop
