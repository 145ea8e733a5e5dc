"""Exact replay: a reply that comes back in a later prompt gets the token ids it was generated with.

The chat template renders the reply again, and its tokens would differ (spacing, the order of keys,
splits), so the prefix cache would find nothing behind them.

    rendered text   | prompt            | reply, rendered again | <|im_end|>, next turns |
    token ids       | tokenized         | kept                  | tokenized              |
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nanovllm.serve.parsing.events import BlockDelta, BlockEvent, BlockStart

MAX_BYTES = 64 * 2**20
MAX_REPLIES = 128  # kept for one prompt: its retries and choices
ENTRY_BYTES = 800  # size of a kept reply without its texts and token ids
# Prompts end with a generation prompt, so their last characters show where replies may begin.
ENDING_LENGTH, MAX_ENDINGS = 4, 16


@dataclass(frozen=True, slots=True)
class Reply:
    """What the parser reads from a reply; surrounding whitespace does not count."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]  # names, and arguments in canonical form


@dataclass(frozen=True, slots=True)
class KeptReply:
    content: Reply
    token_ids: array[int]  # without the stop token
    stop_id: int
    stop: str  # text of the stop token

    @property
    def num_bytes(self) -> int:
        texts = self.content.reasoning, self.content.text, *sum(self.content.calls, ())
        return ENTRY_BYTES + sys.getsizeof(self.token_ids) + sum(map(sys.getsizeof, texts))


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    text: str
    token_ids: list[int]
    key: bytes  # hash of the text and the cache salt


# Reads a reply from its text, given the last characters before it.
ReadReply = Callable[[str, str], Reply]


class ReplayCache:
    """The most recently used replies of one model, found by their prompts. Thread-safe."""

    def __init__(self, encode: Callable[[str], list[int]], max_bytes: int = MAX_BYTES) -> None:
        self._encode = encode
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._replies: OrderedDict[bytes, list[KeptReply]] = OrderedDict()  # by the prompt's key
        self._endings: OrderedDict[str, None] = OrderedDict()  # last characters of the prompts
        self._lock = threading.Lock()

    def keep(self, prompt: EncodedPrompt, reply: KeptReply) -> None:
        """Keep a reply; it replaces one with the same content."""
        with self._lock:
            before = self._remove(prompt.key)
            others = [each for each in before if each.content != reply.content]
            self._replies[prompt.key] = replies = [*others[1 - MAX_REPLIES :], reply]
            self._num_bytes += sum(each.num_bytes for each in replies)
            while self._num_bytes > self._max_bytes:
                self._remove(next(iter(self._replies)))
            self._endings[prompt.text[-ENDING_LENGTH:]] = None
            self._endings.move_to_end(prompt.text[-ENDING_LENGTH:])
            while len(self._endings) > MAX_ENDINGS:
                self._endings.popitem(last=False)

    def encode(self, text: str, salt: str | None, read: ReadReply) -> EncodedPrompt:
        """Tokenize a rendered conversation; use the kept token ids of the replies in it."""
        hasher = hashlib.blake2b(repr(salt).encode() + b"\0", digest_size=16)
        token_ids: list[int] = []
        start, stop_id, hashed = 0, None, 0  # `start` is the end of the last kept reply
        for position in self._candidates(text):
            if position < start:
                continue
            hasher.update(text[hashed:position].encode())
            hashed = position
            reply = self._find(hasher.digest(), text, position, read)
            if reply is not None:
                piece = self._piece(text[start:position], stop_id)
                if piece is None:  # the tokenizer joined the stop token with what follows
                    break
                token_ids += [*piece, *reply.token_ids]
                start, stop_id = text.index(reply.stop, position), reply.stop_id
        hasher.update(text[hashed:].encode())
        last = self._piece(text[start:], stop_id)
        token_ids = self._encode(text) if last is None else token_ids + last
        return EncodedPrompt(text, token_ids, hasher.digest())

    def check(self) -> None:
        """Recompute the size of all replies."""
        sizes = [each.num_bytes for replies in self._replies.values() for each in replies]
        assert self._num_bytes == sum(sizes) <= self._max_bytes
        assert all(self._replies.values())

    def _piece(self, text: str, stop_id: int | None) -> list[int] | None:
        """Tokenize the text after a reply; None if it does not begin with the stop token."""
        token_ids = self._encode(text)
        return token_ids if stop_id is None or token_ids[:1] == [stop_id] else None

    def _candidates(self, text: str) -> Iterator[int]:
        """Yield the positions where a kept reply may begin."""
        with self._lock:
            endings = "|".join(map(re.escape, self._endings)) or "(?!)"
        for match in re.finditer(f"(?=({endings}))", text):  # they may overlap
            yield match.end(1)

    def _find(self, key: bytes, text: str, position: int, read: ReadReply) -> KeptReply | None:
        """Return the kept reply to this prompt with the same content as the text after it."""
        with self._lock:
            if key not in self._replies:
                return None
            self._replies.move_to_end(key)
            replies = self._replies[key][::-1]
        contents: dict[str, Reply | None] = {}  # what follows, up to the text of a stop token
        for reply in replies:
            if reply.stop not in contents:
                end = text.find(reply.stop, position)
                before = text[max(position - 100, 0) : position]
                content = None if end < 0 else read(before, text[position:end])
                contents[reply.stop] = content
            if contents[reply.stop] == reply.content:
                return reply
        return None

    def _remove(self, key: bytes) -> list[KeptReply]:
        replies = self._replies.pop(key, [])
        self._num_bytes -= sum(each.num_bytes for each in replies)
        return replies


def read_events(events: Iterable[BlockEvent]) -> Reply:
    """Combine the events of a whole reply."""
    texts = {"reasoning": "", "text": ""}
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, BlockStart) and event.kind == "tool_call":
            calls.append([event.name, ""])
        elif isinstance(event, BlockDelta) and event.kind == "tool_call":
            calls[-1][1] += event.text
        elif isinstance(event, BlockDelta):
            texts[event.kind] += event.text
    canonical_calls = tuple((name, canonical(arguments)) for name, arguments in calls)
    return Reply(texts["reasoning"].strip(), texts["text"].strip(), canonical_calls)


def canonical(arguments: str) -> str:
    """Return a JSON text with sorted keys and, as in JavaScript, without the fraction of 1.0."""
    try:
        return json.dumps(json.loads(arguments, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):  # the call is incomplete
        return arguments


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
