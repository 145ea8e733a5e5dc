"""Normalize the sampling options `logit_bias` and `logits_processors`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.validation import as_python, require


def as_bias(value: Any) -> dict[int, float]:
    """Convert a bias to a dict; token ids may be strings of digits, as JSON keys are."""
    try:
        pairs = [(int(str(key)), as_python(each)) for key, each in value.items()]
        bias = {key: float(each) for key, each in pairs if not isinstance(each, str)}
    except (AttributeError, TypeError, ValueError, OverflowError):
        pairs, bias = [(0, 0)], {}
    is_valid = len(bias) == len(pairs)
    require(is_valid, "logit_bias", "numbers in [-100, 100] keyed by token id", value, ConfigError)
    return bias


def as_processors(value: Any) -> tuple[Any, ...]:
    """Convert an iterable of functions or of their names to a tuple."""
    items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
    is_valid = all(callable(each) or re.fullmatch(r"[\w.]+:[\w.]+", str(each)) for each in items)
    expected = "a list of functions or of their names as 'module:function'"
    require(is_valid, "logits_processors", expected, value, ConfigError)
    return items
