"""An answer as blocks of reasoning, text and calls, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

from nanovllm.engine.detokenizer import REPLACEMENT
from nanovllm.outputs import Logprob
from nanovllm.server.chat import Chat, chat_updates
from nanovllm.server.generation import Finish, Usage
from nanovllm.server.parsing.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
)
from nanovllm.server.service import Service
from nanovllm.server.token_bytes import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["reasoning", "text", "call"]
TokenLogprobs = tuple[int, dict[int, Logprob]]  # the token, and what is known of it and others


@dataclass(slots=True)
class Block:
    index: int
    kind: Kind
    id: str  # of a call: the one that its result will name
    name: str = ""  # of the tool that is called
    text: str = ""  # so far; of a call, its arguments
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of a text, if asked for


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    block: Block
    piece: str
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block
    is_complete: bool  # or the answer was cut off there


BlockEvent = Opened | Grew | Closed | Finish


async def blocks(service: Service, chat: Chat, usage: Usage) -> AsyncGenerator[BlockEvent, None]:
    """Yield what happens to the blocks of an answer, and last of all how it ended."""
    writer = _Writer(service.tokenizer)
    waiting: list[TokenLogprobs] = []  # for the text of their tokens
    async with contextlib.aclosing(chat_updates(service, chat)) as updates:
        async for each in updates:
            usage.add(each.update, each.num_reasoning_tokens)
            waiting += zip(each.update.token_ids, each.update.logprobs or (), strict=False)
            for number, event in enumerate(each.events, 1):
                is_last = number == len(each.events)  # where the newest token ends
                for happening in writer.write(event, waiting if is_last else []):
                    yield happening
            if each.events:
                waiting = []
            if each.update.finish is not None:
                for happening in writer.close(each.update.finish.reason == "stop"):
                    yield happening
                yield each.update.finish


class _Writer:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._num_blocks = 0
        self._block: Block | None = None  # that is open

    def write(self, event: Event, logprobs: list[TokenLogprobs]) -> Iterator[BlockEvent]:
        match event:
            case Content(text):
                yield from self._grow("text", text, logprobs)
            case Reasoning(text):
                yield from self._grow("reasoning", text)
            case CallBegun(id=call_id, name=name):
                yield from self._open("call", call_id, name)
            case CallArguments(text=text):
                yield from self._grow("call", text)
            case CallEnded(is_complete=is_complete):
                yield from self.close(is_complete)

    def close(self, is_complete: bool = True) -> Iterator[BlockEvent]:
        if self._block is not None:
            yield Closed(self._block, is_complete)
            self._block = None

    def _open(self, kind: Kind, block_id: str, name: str = "") -> Iterator[BlockEvent]:
        yield from self.close()
        self._block = Block(self._num_blocks, kind, block_id, name)
        self._num_blocks += 1
        yield Opened(self._block)

    def _grow(
        self, kind: Kind, piece: str, logprobs: Sequence[TokenLogprobs] = ()
    ) -> Iterator[BlockEvent]:
        if self._block is None or self._block.kind != kind:
            logprobs = _covering(self._tokenizer, logprobs, piece)
            yield from self._open(kind, uuid4().hex)
        assert self._block is not None
        self._block.text += piece
        self._block.logprobs += logprobs
        yield Grew(self._block, piece, logprobs)


def _covering(
    tokenizer: PreTrainedTokenizerBase, logprobs: Sequence[TokenLogprobs], text: str
) -> Sequence[TokenLogprobs]:
    """The last tokens, as many as make up a text; those of a marker before it are left out."""
    pieces: list[bytes] = []
    num_sure = len(text.replace(REPLACEMENT, "?").encode("utf-8", "replace"))  # bytes at least
    for token_id, known in reversed(logprobs):
        token = known[token_id].decoded_token or " "
        piece = token_bytes(tokenizer, token_id, token)
        if num_sure <= 0:
            found = _text_of(pieces)
            is_same = len(_text_of([*pieces, piece])) == len(found)  # of one character
            if len(found) >= len(text) and not is_same:
                break
            num_sure = max(0, len(text) - len(found))
        pieces.append(piece)
        num_sure -= len(piece)
    return logprobs[len(logprobs) - len(pieces) :]


def _text_of(pieces: list[bytes]) -> str:
    """Of the last piece first."""
    return b"".join(reversed(pieces)).decode("utf-8", "replace")
