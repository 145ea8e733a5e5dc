"""Text from tokens as they come: whole characters only, stop strings found across token borders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from nanovllm.sampling_params import SamplingParams

MAX_WINDOW = 12  # tokens decoded again at each step, at most
REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character


class Decodes(Protocol):
    """The one method of a transformers tokenizer that is needed here."""

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = ..., **options: Any
    ) -> str | list[str]: ...


def decode(tokenizer: Decodes, token_ids: list[int], params: SamplingParams) -> str:
    """Decode in one go."""
    skip_special = params.skip_special_tokens
    text = tokenizer.decode(token_ids, skip_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def decode_whole(tokenizer: Decodes, token_ids: list[int], params: SamplingParams) -> str:
    """Decode an answer that has no stop strings, as a stream would show it."""
    text = decode(tokenizer, token_ids, params)
    if REPLACEMENT not in text:
        return text
    # Where tokens are bytes, one that makes no character would spoil all those beside it.
    detokenizer = Detokenizer(tokenizer, params)
    for token_id in token_ids:
        detokenizer.push(token_id)
    detokenizer.finish()
    return detokenizer.text


def num_held(text: str, markers: Iterable[str]) -> int:
    """Length of the longest suffix that begins one of the markers and must be held back."""
    longest = 0
    for marker in markers:
        start = max(len(text) - len(marker), 0)
        while (start := text.find(marker[0], start)) >= 0 and not marker.startswith(text[start:]):
            start += 1
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest


class Detokenizer:
    """The text of one sequence; `push` tokens, `take` what is safe to show.

    Decoding is not a sum over tokens: spaces and characters depend on neighbors. So each step
    decodes a short window that starts at text already shown and takes what the window gained.
    """

    def __init__(self, tokenizer: Decodes, params: SamplingParams) -> None:
        self.text = ""
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._params = params
        self._stops: tuple[str, ...] = tuple(params.stop)
        self._window: list[int] = []
        self._num_context = 0  # tokens at the start of the window, kept for what follows them
        self._num_shown = 0  # characters of the window's text that are in self.text
        self._num_taken = 0
        self.found_stop: str | None = None
        self._search_from = 0
        self._min_end = 0  # a stop string must end past the text of min_tokens

    def push(self, token_id: int) -> bool:
        """Add a token; True when the text now ends at a stop string, which is cut off."""
        self.num_tokens += 1
        self._window.append(token_id)
        self._read(is_last=False)
        if self.num_tokens < self._params.min_tokens:
            self._min_end = len(self.text)
            return False
        return self._cut_at_stop()

    def finish(self) -> None:
        """No token will follow: show incomplete bytes as they are."""
        if self.found_stop is None:
            self._read(is_last=True)
            self._cut_at_stop()
        self._stops = ()

    def take(self) -> str:
        """Return the text not taken yet, less what may prove to be the start of a stop string."""
        end = len(self.text) - num_held(self.text, self._stops)
        piece = self.text[self._num_taken : end]
        self._num_taken = max(end, self._num_taken)
        return piece

    def _read(self, is_last: bool) -> None:
        text = decode(self._tokenizer, self._window, self._params)
        is_full = len(self._window) > MAX_WINDOW
        # Full of bytes that never make a character: an incomplete one has at most 3.
        most = 0 if is_last else 3 if is_full else len(text)
        num_unsettled = min(len(text) - len(text.rstrip(REPLACEMENT)), most)
        piece = text[self._num_shown : len(text) - num_unsettled]
        self.text += piece
        self._num_shown += len(piece)
        if piece and not num_unsettled:  # the tokens just read are context enough
            self._keep(self._window[self._num_context :], 0)
        elif is_full and num_unsettled:  # special tokens may stand between a character's bytes
            shown = [each for each in self._window if decode(self._tokenizer, [each], self._params)]
            self._keep(shown[-9:], num_unsettled)  # of 3 replaced characters each has up to 3 bytes
        elif is_full:  # tokens without text, such as special ones
            self._keep(self._window[: self._num_context], 0)

    def _keep(self, window: list[int], num_unsettled: int) -> None:
        self._window = window
        self._num_context = len(window)
        text = decode(self._tokenizer, window, self._params)
        self._num_shown = len(text) - num_unsettled

    def _cut_at_stop(self) -> bool:
        longest = max(map(len, self._stops), default=0)
        found = [(self._find(stop), stop) for stop in self._stops]
        stops = [(start, stop) for start, stop in found if start >= 0]
        if stops:
            start, stop = min(stops, key=lambda found: (found[0], len(found[1])))
            is_kept = self._params.include_stop_str_in_output
            self.text = self.text[: start + len(stop) if is_kept else start]
            self.found_stop = stop
            return True
        self._search_from = max(0, len(self.text) - longest + 1)
        return False

    def _find(self, stop: str) -> int:
        return self.text.find(stop, max(self._search_from, self._min_end - len(stop) + 1))
