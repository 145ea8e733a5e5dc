"""Content-block events: what the parser emits and every API renders, in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
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


def merge(events: Iterable[BlockEvent]) -> list[BlockEvent]:
    """Join adjacent deltas of a block."""
    merged: list[BlockEvent] = []
    for _, group in groupby(events, lambda event: (type(event), event.index)):
        same = list(group)
        texts = [each.text for each in same if isinstance(each, BlockDelta)]
        first = same[0]
        merged.append(
            replace(first, text="".join(texts)) if isinstance(first, BlockDelta) else first
        )
    return merged
