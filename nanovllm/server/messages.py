"""/v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from uuid import uuid4

from nanovllm.server.answer import Event
from nanovllm.server.blocks import Block, BlockEvent, Closed, Grew, Opened, blocks
from nanovllm.server.chat import Chat, prepare_chat, prompt_of
from nanovllm.server.errors import ApiError, to_json
from nanovllm.server.generation import Finish, Usage
from nanovllm.server.messages_records import CountRequest, MessagesRequest
from nanovllm.server.service import Service

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
# The field that a block of each kind grows by, and what the event of that is called.
GROWTH = {
    "text": ("text", "text_delta"),
    "reasoning": ("thinking", "thinking_delta"),
    "call": ("partial_json", "input_json_delta"),
}


async def answer_message(service: Service, request: MessagesRequest) -> MessageAnswer:
    return MessageAnswer(service, await prepare_chat(service, request.chat()))


async def count_tokens(service: Service, request: CountRequest) -> dict[str, int]:
    prompt = await prompt_of(service, request.as_chat())
    return {"input_tokens": len(prompt.token_ids)}


class MessageAnswer:
    end = b""
    is_large = False

    def __init__(self, service: Service, chat: Chat) -> None:
        self._service, self._chat = service, chat
        self._usage = Usage(chat.job.num_prompt_tokens)
        self._has_calls = False

    async def events(self) -> AsyncGenerator[Event, None]:
        message: Event = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._service.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._counts(),
        }
        begin = {"type": "message_start", "message": message}
        async with contextlib.aclosing(
            blocks(self._service, self._chat, self._usage)
        ) as happenings:
            async for happening in happenings:
                if begin:
                    yield begin
                    begin = {}
                for event in self._write(happening):
                    yield event
        yield {"type": "message_stop"}

    def whole(self, events: list[Event]) -> Event:
        """Put the blocks of a stream into its message."""
        message: Event = events[0]["message"]
        partial = ""
        for event in events:
            if event["type"] == "content_block_start":
                message["content"].append(dict(event["content_block"]))
                partial = ""
            elif event["type"] == "content_block_delta":
                block, delta = message["content"][-1], dict(event["delta"])
                kind = delta.pop("type")
                ((name, piece),) = delta.items()
                if kind == "input_json_delta":
                    partial += piece
                else:
                    block[name] += piece
            elif event["type"] == "content_block_stop" and partial:
                message["content"][-1]["input"] = _as_object(partial)
            elif event["type"] == "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
        return message

    def error(self, error: ApiError) -> list[Event]:
        return [error.anthropic()]

    def encode(self, event: Event) -> bytes:
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event))

    def _write(self, happening: BlockEvent) -> Iterator[Event]:
        match happening:
            case Opened(block):
                self._has_calls |= block.kind == "call"
                yield self._event("start", block, content_block=_empty(block))
            case Grew(block, piece):
                name, kind = GROWTH[block.kind]
                yield self._event("delta", block, delta={"type": kind, name: piece})
            case Closed(block):
                if block.kind == "reasoning":
                    delta = {"type": "signature_delta", "signature": _signature(block.text)}
                    yield self._event("delta", block, delta=delta)
                yield self._event("stop", block)
            case Finish():
                delta = self._ending(happening)
                yield {"type": "message_delta", "delta": delta, "usage": self._counts()}

    def _event(self, what: str, block: Block, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": block.index, **fields}

    def _ending(self, finish: Finish) -> dict[str, Any]:
        reason = STOP_REASONS[finish.reason]
        if reason == "end_turn" and self._has_calls:
            reason = "tool_use"
        if finish.reason == "stop" and isinstance(finish.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
        return {"stop_reason": reason, "stop_sequence": None}

    def _counts(self) -> dict[str, int]:
        return {
            "input_tokens": self._usage.num_prompt_tokens,
            "output_tokens": self._usage.num_completion_tokens,
        }


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _signature(text: str) -> str:
    """Clients send thoughts back with one; it is not looked at."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _as_object(text: str) -> Any:
    """The arguments of a call; none where it was cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return {}
