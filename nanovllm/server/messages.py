"""/v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from uuid import uuid4

from nanovllm.server.answer import Event
from nanovllm.server.chat import Chat, chat_updates, prepare_chat, prompt_of
from nanovllm.server.errors import ApiError, to_json
from nanovllm.server.generation import Finish, Usage
from nanovllm.server.messages_records import CountRequest, MessagesRequest
from nanovllm.server.parsing.events import BlockDelta, BlockEvent, BlockStart, BlockStop
from nanovllm.server.service import Service

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
# By kind of block: the field of a delta, and the delta's type.
DELTAS = {
    "text": ("text", "text_delta"),
    "reasoning": ("thinking", "thinking_delta"),
    "tool_call": ("partial_json", "input_json_delta"),
}
SIGNATURE = "unsigned"  # clients send reasoning back with one, which is not looked at


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
        self._content: list[Event] = []  # the blocks so far
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
        async with contextlib.aclosing(chat_updates(self._service, self._chat)) as updates:
            async for update in updates:
                self._usage.add(update)
                if begin:
                    yield begin
                    begin = {}
                for event in update.events:
                    for rendered in self._render(event):
                        yield rendered
                if update.finish is not None:
                    delta = self._ending(update.finish)
                    yield {"type": "message_delta", "delta": delta, "usage": self._counts()}
        yield {"type": "message_stop"}

    def whole(self, events: list[Event]) -> Event:
        last = events[-2]
        content = {"content": self._content}
        return {**events[0]["message"], **content, **last["delta"], "usage": last["usage"]}

    def error(self, error: ApiError) -> list[Event]:
        return [error.anthropic()]

    def encode(self, event: Event) -> bytes:
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event))

    def _render(self, event: BlockEvent) -> Iterator[Event]:
        """Write an event in Anthropic's form, and add it to the whole message."""
        index = event.index
        match event:
            case BlockStart():
                self._has_calls |= event.kind == "tool_call"
                block = _empty(event)
                self._content.append(dict(block))
                yield {"type": "content_block_start", "index": index, "content_block": block}
            case BlockDelta(kind=kind, text=text):
                name, delta = DELTAS[kind]
                self._content[-1][name] = self._content[-1].get(name, "") + text
                delta = {"type": delta, name: text}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            case BlockStop(kind=kind):
                block = self._content[-1]
                if kind == "tool_call":
                    block["input"] = _as_object(block.pop("partial_json", ""))
                elif kind == "reasoning":
                    block["signature"] = SIGNATURE
                    delta = {"type": "signature_delta", "signature": SIGNATURE}
                    yield {"type": "content_block_delta", "index": index, "delta": delta}
                yield {"type": "content_block_stop", "index": index}

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


def _empty(block: BlockStart) -> dict[str, Any]:
    if block.kind == "tool_call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _as_object(text: str) -> Any:
    """The arguments of a call; none where it was cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return {}
