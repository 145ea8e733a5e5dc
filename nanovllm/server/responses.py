"""/v1/responses, without memory: what an answer depends on is in its request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from nanovllm.server.answer import Event
from nanovllm.server.blocks import Block, BlockEvent, Closed, Grew, Opened, TokenLogprobs, blocks
from nanovllm.server.chat import Chat, prepare_chat
from nanovllm.server.chat_completions import logprob_entries
from nanovllm.server.errors import ApiError, to_json
from nanovllm.server.generation import Finish, Usage
from nanovllm.server.responses_records import ResponsesRequest
from nanovllm.server.service import Service

GROWTH = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
PARTS = {"text": "output_text", "reasoning": "reasoning_text"}


async def answer_response(service: Service, request: ResponsesRequest) -> ResponseAnswer:
    chat = await prepare_chat(service, request.chat(), "input")
    if request.has_logprobs:  # which tokens are whose shows only as they come
        chat = replace(chat, job=replace(chat.job, is_streaming=True))
    return ResponseAnswer(service, chat, request)


class ResponseAnswer:
    end = b""

    def __init__(self, service: Service, chat: Chat, request: ResponsesRequest) -> None:
        self._service, self._chat = service, chat
        self._usage = Usage(chat.job.num_prompt_tokens)
        self._output: list[Event] = []  # the items so far
        self._num_events = 0
        self._num_best = request.top_logprobs or 0
        self.is_large = request.has_logprobs  # the last events repeat those of all tokens
        params = chat.job.params[0]
        self._response: Event = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": service.model_name,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": request.reasoning and request.reasoning.effort,
                "summary": None,
            },
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": _dumped(request.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in request.tools or ()],
            "top_logprobs": self._num_best,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }
        if request.text is not None and request.text.format is not None:
            self._response["text"] = {"format": _dumped(request.text.format)}

    async def events(self) -> AsyncGenerator[Event, None]:
        has_begun = False
        async with contextlib.aclosing(
            blocks(self._service, self._chat, self._usage)
        ) as happenings:
            async for happening in happenings:
                if not has_begun:
                    has_begun = True
                    yield self._event("response.created", response=self._snapshot())
                    yield self._event("response.in_progress", response=self._snapshot())
                for event in self._write(happening):
                    yield event

    def whole(self, events: list[Event]) -> Event:
        response: Event = events[-1]["response"]
        return response

    def error(self, error: ApiError) -> list[Event]:
        self._response |= {
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
        }
        return [self._event("response.failed", response=self._snapshot())]

    def encode(self, event: Event) -> bytes:
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event))

    def _event(self, name: str, **fields: Any) -> Event:
        event = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _snapshot(self) -> Event:
        return {**self._response, "output": list(self._output)}

    def _write(self, happening: BlockEvent) -> Iterator[Event]:
        match happening:
            case Opened(block):
                item = self._item(block, "in_progress")
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind != "call":
                    yield self._part_event("added", block)
            case Grew(block, piece, logprobs):
                spot = self._spot(block, logprobs)
                yield self._event(f"{GROWTH[block.kind]}.delta", **spot, delta=piece)
            case Closed(block, is_complete):
                name = "arguments" if block.kind == "call" else "text"
                spot = self._spot(block, block.logprobs)
                yield self._event(f"{GROWTH[block.kind]}.done", **spot, **{name: block.text})
                if block.kind != "call":
                    yield self._part_event("done", block)
                item = self._item(block, "completed" if is_complete else "incomplete")
                self._output.append(item)
                yield self._event("response.output_item.done", output_index=block.index, item=item)
            case Finish():
                yield self._finish(happening)

    def _part_event(self, what: str, block: Block) -> Event:
        spot = {"item_id": _item_id(block), "output_index": block.index, "content_index": 0}
        return self._event(f"response.content_part.{what}", **spot, part=self._part(block))

    def _spot(self, block: Block, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Where a piece of a block goes."""
        spot: dict[str, Any] = {"item_id": _item_id(block), "output_index": block.index}
        if block.kind == "call":
            return spot
        spot["content_index"] = 0
        return spot | (self._logprobs(logprobs) if block.kind == "text" else {})

    def _part(self, block: Block) -> dict[str, Any]:
        part: dict[str, Any] = {"type": PARTS[block.kind], "text": block.text}
        is_text = block.kind == "text"
        return part | ({"annotations": [], **self._logprobs(block.logprobs)} if is_text else {})

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokenizer = self._service.tokenizer
        return {"logprobs": logprob_entries(tokenizer, logprobs, self._num_best)}

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": _item_id(block), "status": status}
        if block.kind == "call":
            called = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **called}
        content = [self._part(block)] if status != "in_progress" else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _finish(self, finish: Finish) -> Event:
        usage = self._usage
        # Writing to the cache is something that OpenAI charges for; here nothing is.
        cached = {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0}
        status = "completed" if finish.reason == "stop" else "incomplete"
        self._response |= {
            "status": status,
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": cached,
                "output_tokens": usage.num_completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
                "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
            },
        }
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._event(f"response.{status}", response=self._snapshot())


def _item_id(block: Block) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.id


def _dumped(record: Any) -> Any:
    is_plain = record is None or isinstance(record, str)
    return record if is_plain else record.model_dump(by_alias=True)
