"""The tokens that make up a text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.outputs import Logprob
from nanovllm.serve.openai.openai_logprobs import TokenLogprobs, covering

BYTES: Any = SimpleNamespace(convert_ids_to_tokens=lambda ids: [f"<0x{i:02X}>" for i in ids])


def tokens(*texts: str | bytes) -> list[TokenLogprobs]:
    """Return one token for each string, and one token per byte for bytes."""
    found: list[TokenLogprobs] = []
    for text in texts:
        pairs = [(999, text)] if isinstance(text, str) else [(each, "\ufffd") for each in text]
        found += [(i, {i: Logprob(-1.0, 1, token)}) for i, token in pairs]
    return found


@pytest.mark.parametrize(
    ("made_of", "text"),
    [
        (["Hello", " world"], "Hello world"),
        ([" world"], "world"),  # the parser dropped the space
        (["日".encode(), "a"], "日a"),
        (["x", "日本".encode(), "y"], "x日本y"),
    ],
)
def test_tokens_of_a_marker_before_a_text_are_left_out(
    made_of: list[str | bytes], text: str
) -> None:
    own = tokens(*made_of)
    for marker in ([], ["</think>"], ["</", "think", ">", "\n\n"]):
        assert covering(BYTES, tokens(*marker) + own, text) == own
