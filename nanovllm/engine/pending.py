"""A value that is on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pending(Generic[T]):
    """`result()` waits for the value, and raises what went wrong on its way."""

    result: Callable[[], T]
