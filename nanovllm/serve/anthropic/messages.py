"""Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field

from nanovllm.engine.conversations import refuse_media
from nanovllm.errors import NanovllmError, RequestError
from nanovllm.serve.generation import ApiResponse, GenerationJob, Update
from nanovllm.serve.http_errors import anthropic_body
from nanovllm.serve.http_responses import Event
from nanovllm.serve.parsing.events import BlockDelta, BlockEvent, BlockStart, BlockStop
from nanovllm.serve.parsing.tools import is_json
from nanovllm.serve.prepare_chat import prepare_chat, prompt_of
from nanovllm.serve.protocol import ApiModel, ChatRequest, Effort, Listed, as_api_model, nested
from nanovllm.serve.service import Service

SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "stream"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
# Kind of content block -> (field of a delta, type of the delta).
DELTAS = {
    "text": ("text", "text_delta"),
    "reasoning": ("thinking", "thinking_delta"),
    "tool_call": ("partial_json", "input_json_delta"),
}
SIGNATURE = "unsigned"  # clients require one; it is ignored when they send reasoning back


async def create_message(service: Service, request: MessagesRequest) -> MessageResponse:
    return MessageResponse(service, await prepare_chat(service, request.chat()))


async def count_tokens(service: Service, request: CountRequest) -> dict[str, int]:
    prompt = await prompt_of(service, request.chat())
    return {"input_tokens": len(prompt.token_ids)}


class MessageResponse(ApiResponse):
    has_names = True

    def __init__(self, service: Service, job: GenerationJob) -> None:
        super().__init__(service, job)
        self._content: list[Event] = []  # the content blocks so far
        self._has_begun = self._has_calls = False
        self._message: Event = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": service.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._counts(),
        }

    def render(self, update: Update) -> Iterator[Event]:
        if not self._has_begun:
            yield {"type": "message_start", "message": self._message}
            self._has_begun = True
        for event in update.events:
            yield from self._render(event)
        if update.finish_reason is not None:
            delta = self._ending(update)
            yield {"type": "message_delta", "delta": delta, "usage": self._counts()}

    def last_events(self) -> list[Event]:
        return [{"type": "message_stop"}]

    def whole(self, events: list[Event]) -> Event:
        last = events[-2]
        content = {"content": self._content}
        return {**events[0]["message"], **content, **last["delta"], "usage": last["usage"]}

    def error(self, error: NanovllmError) -> Event:
        return anthropic_body(error)

    def _render(self, event: BlockEvent) -> Iterator[Event]:
        """Convert an event to Anthropic's format, and apply it to `_content`."""
        index = event.index
        match event:
            case BlockStart():
                self._has_calls |= event.kind == "tool_call"
                block = _empty(event)
                self._content.append(dict(block))
                yield {"type": "content_block_start", "index": index, "content_block": block}
            case BlockDelta(kind=kind, text=text):
                name, delta_type = DELTAS[kind]
                self._content[-1][name] = self._content[-1].get(name, "") + text
                delta = {"type": delta_type, name: text}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            case BlockStop(kind=kind):
                block = self._content[-1]
                if kind == "tool_call":
                    arguments = block.pop("partial_json", "")  # incomplete if the call was cut off
                    block["input"] = json.loads(arguments) if is_json(arguments) else {}
                elif kind == "reasoning":
                    block["signature"] = SIGNATURE
                    delta = {"type": "signature_delta", "signature": SIGNATURE}
                    yield {"type": "content_block_delta", "index": index, "delta": delta}
                yield {"type": "content_block_stop", "index": index}

    def _ending(self, update: Update) -> dict[str, Any]:
        reason = STOP_REASONS[update.finish_reason or "stop"]
        if reason == "end_turn" and self._has_calls:
            reason = "tool_use"
        if update.finish_reason == "stop" and isinstance(update.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": update.stop_reason}
        return {"stop_reason": reason, "stop_sequence": None}

    def _counts(self) -> dict[str, int]:
        return {
            "input_tokens": self.usage.num_prompt_tokens,
            "output_tokens": self.usage.num_completion_tokens,
        }


def _empty(block: BlockStart) -> dict[str, Any]:
    if block.kind == "tool_call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


class Turn(ApiModel):
    role: Literal["user", "assistant"]
    content: str | Listed[dict[str, Any]]


class CustomTool(ApiModel):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None  # ignored: arguments are always streamed

    def as_function(self) -> dict[str, Any]:
        own = self.model_dump(exclude_none=True, include={"name", "description", "strict"})
        return {"type": "function", "function": {**own, "parameters": self.input_schema}}


class Choice(ApiModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(ApiModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    format: OutputFormat | None = None
    effort: Effort | None = None


class CountRequest(ApiModel):
    """The fields of a request that determine its prompt."""

    messages: Listed[Turn] = Field(min_length=1)
    model: str | None = None
    system: str | Listed[dict[str, Any]] | None = None
    tools: Listed[CustomTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: Any = None

    def chat(self) -> ChatRequest:
        messages = [] if self.system is None else _messages("system", self.system, "system")
        for index, turn in enumerate(self.messages):
            messages += _messages(turn.role, turn.content, f"messages[{index}].content")
        form, choice = self.output_config.format, self.tool_choice
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "tools": self.tools and [tool.as_function() for tool in self.tools],
            "tool_choice": choice and _tool_choice(choice),
            "parallel_tool_calls": choice and not choice.disable_parallel_tool_use,
            "continue_final_message": _is_begun(self.messages[-1]),
            "reasoning_effort": self.output_config.effort,
            "response_format": form and nested(form.model_dump(by_alias=True), "json_schema"),
        }
        if self.thinking is not None:
            is_on = self.thinking.type != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": is_on}
        return as_api_model(ChatRequest, fields | self._sampling())

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: Listed[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Any = None
    service_tier: Any = None
    thread: Any = None

    def _sampling(self) -> dict[str, Any]:
        if self.thread is not None:  # this error code makes clients retry without a thread
            message = "thread is not supported by this server; send all messages"
            raise RequestError(message, param="thread", code="thread_unsupported_request")
        return {"stop": self.stop_sequences, **self.model_dump(include=SAMPLING)}


def _is_begun(last: Turn) -> bool:
    """Return whether the completion continues the last turn instead of starting a new one."""
    blocks = _blocks(last.content)
    return last.role == "assistant" and bool(blocks) and blocks[-1].get("type") == "text"


def _tool_choice(choice: Choice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return "required" if choice.type == "any" else choice.type


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _messages(role: str, content: str | list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Convert a turn to chat messages: first the tool results, then a message with the rest.

    `path` is the content's path in the request, for errors.
    """
    texts, reasoning, calls, results = [], [], [], []
    for index, block in enumerate(_blocks(content)):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                reasoning.append(text)
            case {"type": "tool_use", "id": str(call_id), "name": str(name)} if role == "assistant":
                function = {"name": name, "arguments": block.get("input") or {}}
                calls.append({"type": "function", "id": call_id, "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id)} if role == "user":
                inner = f"{path}[{index}].content"
                [result] = _messages("tool", block.get("content") or "", inner)
                results.append({**result, "tool_call_id": call_id})
            case _:
                refuse_media(block, path)
                problem = f"this content block is not supported in {role} messages"
                raise RequestError(f"{path}: {problem}: {block!r:.80}", param="messages")
    if results and not texts:
        return results
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if reasoning:
        message["reasoning"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]
