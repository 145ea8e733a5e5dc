"""Incremental detokenization: whole characters only, and stop strings that may span tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from nanovllm.sampling_params import SamplingParams

MAX_WINDOW = 12  # maximum number of tokens decoded again with each new token
REPLACEMENT = "\ufffd"  # decoders emit it for bytes that do not (yet) form a character


class Decoder(Protocol):
    """The part of a transformers tokenizer that detokenization uses."""

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = ..., **options: Any
    ) -> str | list[str]: ...


def decode(tokenizer: Decoder, token_ids: list[int], params: SamplingParams) -> str:
    """Decode all tokens in one call."""
    skip_special = params.skip_special_tokens
    text = tokenizer.decode(token_ids, skip_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def num_held(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest suffix that could be the start of one of the markers."""
    longest = 0
    for marker in markers:
        start = max(len(text) - len(marker), 0)
        while (start := text.find(marker[0], start)) >= 0 and not marker.startswith(text[start:]):
            start += 1
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest


class Detokenizer:
    """Detokenizes one sequence: `push` tokens, then `take` the text that is safe to show.

    Tokens cannot be decoded one by one: spaces and characters depend on neighbors. So each `push`
    decodes a short window, which begins with emitted tokens, and appends the new characters.
    """

    def __init__(self, tokenizer: Decoder, params: SamplingParams) -> None:
        self.text = ""
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._params = params
        self._stops: tuple[str, ...] = tuple(params.stop)
        self._window: list[int] = []
        self._num_context = 0  # number of leading window tokens that only serve as context
        self._num_emitted = 0  # number of characters of the window that are in self.text
        self._num_taken = 0
        self.found_stop: str | None = None
        self._search_from = 0
        # Length of the text of the first min_tokens - 1 tokens; a stop string must end beyond it.
        self._min_end = 0

    def push(self, token_id: int) -> bool:
        """Add a token. If it completes a stop string, truncate the text there and return True."""
        self.num_tokens += 1
        self._window.append(token_id)
        self._read(is_last=False)
        if self.num_tokens < self._params.min_tokens:
            self._min_end = len(self.text)
            return False
        return self._cut_at_stop()

    def finish(self) -> None:
        """Emit the text held back, including incomplete characters: no more tokens follow."""
        if self.found_stop is None:
            self._read(is_last=True)
            self._cut_at_stop()
        self._stops = ()

    def take(self) -> str:
        """Return the text not taken yet, except a suffix that may be the start of a stop string."""
        end = len(self.text) - num_held(self.text, self._stops)
        piece = self.text[self._num_taken : end]
        self._num_taken = max(end, self._num_taken)
        return piece

    def _read(self, is_last: bool) -> None:
        text = decode(self._tokenizer, self._window, self._params)
        is_full = len(self._window) > MAX_WINDOW
        # An incomplete character has at most 3 bytes, so a full window holds back at most three
        # trailing U+FFFD; any before them stand for invalid bytes.
        most = 0 if is_last else 3 if is_full else len(text)
        num_incomplete = min(len(text) - len(text.rstrip(REPLACEMENT)), most)
        piece = text[self._num_emitted : len(text) - num_incomplete]
        self.text += piece
        self._num_emitted += len(piece)
        if piece and not num_incomplete:  # the tokens just emitted are enough context
            self._keep(self._window[self._num_context :], 0)
        elif is_full and num_incomplete:  # drop special tokens between the bytes of a character
            visible = [
                each for each in self._window if decode(self._tokenizer, [each], self._params)
            ]
            # Keep 9 tokens: up to three trailing U+FFFD are held back, each may stand for up to
            # three bytes, and every visible token has at least one byte.
            self._keep(visible[-9:], num_incomplete)
        elif is_full:  # the new tokens have no text (special tokens)
            self._keep(self._window[: self._num_context], 0)

    def _keep(self, window: list[int], num_incomplete: int) -> None:
        self._window = window
        self._num_context = len(window)
        text = decode(self._tokenizer, window, self._params)
        self._num_emitted = len(text) - num_incomplete

    def _cut_at_stop(self) -> bool:
        longest = max(map(len, self._stops), default=0)
        found = [(self._find(stop), stop) for stop in self._stops]
        stops = [(start, stop) for start, stop in found if start >= 0]
        if stops:
            start, stop = min(stops, key=lambda found: (found[0], len(found[1])))
            is_included = self._params.include_stop_str_in_output
            self.text = self.text[: start + len(stop) if is_included else start]
            self.found_stop = stop
            return True
        self._search_from = max(0, len(self.text) - longest + 1)
        return False

    def _find(self, stop: str) -> int:
        return self.text.find(stop, max(self._search_from, self._min_end - len(stop) + 1))
