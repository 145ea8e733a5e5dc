"""Parse the text of options on the command line."""

from __future__ import annotations

import json
import math
from typing import Any

WHOLE_CONTEXT = 2**31 - 1  # value of max_model_len for the model's own limit


def tokens(text: str) -> int:
    """Parse a number of tokens as vLLM does: 1k is 1000, 1K is 1024, auto is the model's limit."""
    if text == "auto":
        return WHOLE_CONTEXT
    factors = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
    number = float(text[:-1]) * factors[text[-1]] if text[-1:] in factors else int(text)
    if math.isinf(number):
        raise ValueError
    return round(number)


def json_object(text: str) -> Any:
    """Parse JSON; argparse names this function in its error message."""
    return json.loads(text)
