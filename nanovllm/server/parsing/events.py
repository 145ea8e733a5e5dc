"""What is found in a model's text, in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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


TEXTS = (Content, Reasoning, CallArguments)
Event = Content | Reasoning | CallBegun | CallArguments | CallEnded


def merge(events: Iterable[Event]) -> list[Event]:
    """Join texts of one kind that follow each other; other events separate those of two calls."""
    merged: list[Event] = []
    for _, group in groupby(events, type):
        same = list(group)
        texts = [each.text for each in same if isinstance(each, TEXTS)]
        first = same[0]
        merged += [replace(first, text="".join(texts))] if isinstance(first, TEXTS) else same
    return merged
