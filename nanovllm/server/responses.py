"""/v1/responses, without memory: what an answer depends on is in its request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from nanovllm.server.answer import Event
from nanovllm.server.chat import Chat, chat_updates, prepare_chat
from nanovllm.server.errors import ApiError, to_json
from nanovllm.server.generation import Finish, Update, Usage
from nanovllm.server.logprobs import TokenLogprobs, covering, logprob_entries
from nanovllm.server.parsing.events import BlockDelta, BlockStart, BlockStop, Kind
from nanovllm.server.responses_records import ResponsesRequest
from nanovllm.server.service import Service

# By kind of item: the prefix of its id, and the names of its content's events.
ITEM_IDS = {"text": "msg_", "reasoning": "rs_", "tool_call": "fc_"}
CONTENT = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "tool_call": "function_call_arguments",
}


async def answer_response(service: Service, request: ResponsesRequest) -> ResponseAnswer:
    chat = await prepare_chat(service, request.chat(), "input")
    if request.has_logprobs:  # which tokens are whose shows only as they come
        chat = replace(chat, job=replace(chat.job, is_streaming=True))
    return ResponseAnswer(service, chat, request)


@dataclass(slots=True)
class Item:
    """An item of the output, as far as it has come."""

    index: int
    kind: Kind
    id: str
    call_id: str
    name: str
    text: str = ""  # of a call, its arguments
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of a text, if asked for

    @property
    def place(self) -> dict[str, Any]:
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == "tool_call" else {**place, "content_index": 0}


class ResponseAnswer:
    end = b""

    def __init__(self, service: Service, chat: Chat, request: ResponsesRequest) -> None:
        self._service, self._chat = service, chat
        self._usage = Usage(chat.job.num_prompt_tokens)
        self._items: list[Item] = []
        self._output: list[Event] = []  # the finished items
        self._tokens: list[TokenLogprobs] = []  # whose text has not come yet
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
        async with contextlib.aclosing(chat_updates(self._service, self._chat)) as updates:
            async for update in updates:
                self._usage.add(update)
                if not self._num_events:
                    yield self._event("response.created", response=self._snapshot())
                    yield self._event("response.in_progress", response=self._snapshot())
                for event in self._render(update):
                    yield event
                if update.finish is not None:
                    yield self._finish(update.finish)

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

    def _render(self, update: Update) -> Iterator[Event]:
        self._tokens += zip(update.token_ids, update.logprobs or (), strict=False)
        # The newest tokens end where the last piece of text does.
        pieces = [each for each in update.events if not isinstance(each, BlockStop)]
        for event in update.events:
            tokens: Sequence[TokenLogprobs] = self._tokens if event in pieces[-1:] else ()
            match event:
                case BlockStart(index, kind, call_id, name):
                    item = Item(index, kind, ITEM_IDS[kind] + uuid4().hex, call_id, name)
                    self._items.append(item)
                    yield self._item_event("added", item, "in_progress")
                    if kind != "tool_call":
                        yield self._part_event("added", item)
                case BlockDelta(text=text):
                    yield self._grow(self._items[-1], text, tokens)
                case BlockStop(is_complete=is_complete):
                    yield from self._stop(self._items[-1], is_complete)
        if update.events:
            self._tokens = []

    def _grow(self, item: Item, text: str, tokens: Sequence[TokenLogprobs]) -> Event:
        if not item.text:
            tokens = covering(self._service.tokenizer, tokens, text)
        item.text += text
        item.logprobs += tokens
        return self._content_event("delta", item, tokens, delta=text)

    def _stop(self, item: Item, is_complete: bool) -> Iterator[Event]:
        name = "arguments" if item.kind == "tool_call" else "text"
        yield self._content_event("done", item, item.logprobs, **{name: item.text})
        if item.kind != "tool_call":
            yield self._part_event("done", item)
        event = self._item_event("done", item, "completed" if is_complete else "incomplete")
        self._output.append(event["item"])
        yield event

    def _content_event(
        self, what: str, item: Item, tokens: Sequence[TokenLogprobs], **fields: Any
    ) -> Event:
        logprobs = self._logprobs(tokens) if item.kind == "text" else {}
        name = f"response.{CONTENT[item.kind]}.{what}"
        return self._event(name, **item.place, **logprobs, **fields)

    def _part_event(self, what: str, item: Item) -> Event:
        return self._event(f"response.content_part.{what}", **item.place, part=self._part(item))

    def _item_event(self, what: str, item: Item, status: str) -> Event:
        fields: dict[str, Any] = {"id": item.id, "status": status}
        content = [self._part(item)] if item.kind != "tool_call" and status != "in_progress" else []
        if item.kind == "tool_call":
            called = {"call_id": item.call_id, "name": item.name, "arguments": item.text}
            fields |= {"type": "function_call", **called}
        elif item.kind == "reasoning":
            fields |= {"type": "reasoning", "summary": [], "content": content}
        else:
            fields |= {"type": "message", "role": "assistant", "content": content}
        return self._event(f"response.output_item.{what}", output_index=item.index, item=fields)

    def _part(self, item: Item) -> dict[str, Any]:
        part: dict[str, Any] = {"type": CONTENT[item.kind], "text": item.text}
        is_text = item.kind == "text"
        return part | ({"annotations": [], **self._logprobs(item.logprobs)} if is_text else {})

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"logprobs": logprob_entries(self._service.tokenizer, tokens, self._num_best)}

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


def _dumped(record: Any) -> Any:
    is_plain = record is None or isinstance(record, str)
    return record if is_plain else record.model_dump(by_alias=True)
