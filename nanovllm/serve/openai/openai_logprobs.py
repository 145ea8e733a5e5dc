"""Logprobs in the formats of OpenAI's APIs; they are computed lazily, during JSON encoding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.engine.detokenizer import REPLACEMENT
from nanovllm.outputs import Logprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenLogprobs = tuple[int, dict[int, Logprob]]  # sampled token id, and logprobs keyed by token id
Entry = Callable[[], dict[str, Any]]

_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's byte fallback
# GPT-2's byte-level BPE maps these bytes to the same code points, and the others to 256 and up.
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTED)
_BYTE_LEVEL = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(256 + number): byte for number, byte in enumerate(_OTHERS)},
}


def logprob_entries(
    tokenizer: PreTrainedTokenizerBase, tokens: Iterable[TokenLogprobs], num_top: int
) -> list[Entry]:
    """Return the logprobs of tokens in the format of the chat and Responses APIs."""

    def entry(token_id: int, logprobs: dict[int, Logprob]) -> dict[str, Any]:
        top = [
            _logprob(tokenizer, each, logprob)
            for each, logprob in logprobs.items()
            if logprob.rank <= num_top
        ]
        return {**_logprob(tokenizer, token_id, logprobs[token_id]), "top_logprobs": top}

    return [partial(entry, token_id, logprobs) for token_id, logprobs in tokens]


def _logprob(tokenizer: PreTrainedTokenizerBase, token_id: int, logprob: Logprob) -> dict[str, Any]:
    token = logprob.decoded_token or ""
    return {
        "token": token,
        "logprob": logprob.logprob,
        "bytes": list(token_bytes(tokenizer, token_id, token)),
    }


def prompt_logprobs_by_id(
    entries: Sequence[dict[int, Logprob] | None] | None,
) -> list[Any] | None:
    """Return one function per token; each converts the token's entry during JSON encoding."""
    if entries is None:
        return None
    return [partial(_entry_by_id, entries, index) for index in range(len(entries))]


def _entry_by_id(
    entries: Sequence[dict[int, Logprob] | None], index: int
) -> dict[str, dict[str, Any]] | None:
    entry = entries[index]
    if entry is None:
        return None
    return {str(token_id): logprob._asdict() for token_id, logprob in entry.items()}


def covering(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[TokenLogprobs], text: str
) -> Sequence[TokenLogprobs]:
    """Return the trailing tokens that make up `text`; omit those of a marker before it."""
    num_bytes, start = len(text.encode("utf-8", "replace")), len(tokens)
    while start > 0 and num_bytes > 0:
        start -= 1
        token_id, logprobs = tokens[start]
        num_bytes -= len(token_bytes(tokenizer, token_id, logprobs[token_id].decoded_token or " "))
    return tokens[start:]


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int, text: str) -> bytes:
    """Return the bytes of a token; its text has U+FFFD in place of an incomplete character."""
    if REPLACEMENT in text:
        (written,) = tokenizer.convert_ids_to_tokens([token_id])
        if match := _FALLBACK.fullmatch(written):
            return bytes.fromhex(match.group(1))
        if all(char in _BYTE_LEVEL for char in written):
            return bytes(_BYTE_LEVEL[char] for char in written)
    return text.encode("utf-8", "replace")
