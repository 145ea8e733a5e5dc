"""What is found in a model's text, in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments: all pieces of a complete call together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call; an incomplete one was cut off, or its arguments are no JSON."""

    index: int
    is_complete: bool


Event = Content | Reasoning | CallBegun | CallArguments | CallEnded


def merge(events: Iterable[Event]) -> list[Event]:
    """Join texts of one kind that follow each other."""
    merged: list[Event] = []
    for kind, group in groupby(events, type):
        same = list(group)
        if kind is Content or kind is Reasoning:
            merged.append(kind("".join(each.text for each in same)))
        elif kind is CallArguments:  # of one call: other events separate calls
            merged.append(CallArguments(same[0].index, "".join(each.text for each in same)))
        else:
            merged.extend(same)
    return merged
