"""Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field

from nanovllm.errors import NanovllmError
from nanovllm.serve import fields as policies
from nanovllm.serve.chat_turns import as_text, is_image
from nanovllm.serve.fields import NOT_HOSTED, log_ignored
from nanovllm.serve.generation import ApiResponse, GenerationJob, Update
from nanovllm.serve.http_errors import anthropic_body
from nanovllm.serve.http_responses import Event
from nanovllm.serve.parsing.events import BlockDelta, BlockEvent, BlockStart, BlockStop
from nanovllm.serve.parsing.tools import is_object
from nanovllm.serve.prepare_chat import prepare_chat, prompt_of
from nanovllm.serve.protocol import (
    AgentRequest,
    ApiModel,
    Effort,
    Listed,
    Thinking,
    as_api_model,
    nested,
)
from nanovllm.serve.service import Service

SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "stream"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
# Kind of content block -> (field of a delta, type of the delta).
DELTAS = {
    "text": ("text", "text_delta"),
    "reasoning": ("thinking", "thinking_delta"),
    "tool_call": ("partial_json", "input_json_delta"),
}
BILLING = "x-anthropic-billing-header:"  # starts a line of Claude Code that differs between chats
OUR_MODELS = "claude-"  # model names with this prefix refer to the served model
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
            "usage": self._counts(),  # what is cached is known only later
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
                    block["input"] = json.loads(arguments) if is_object(arguments) else {}
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
        """Return the usage; clients add up the first three counts."""
        num_cached = self.usage.num_cached_tokens
        return {
            "input_tokens": self.usage.num_prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.num_completion_tokens,
        }


def _empty(block: BlockStart) -> dict[str, Any]:
    if block.kind == "tool_call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


class Turn(ApiModel):
    policy = policies.MESSAGES_TURN
    role: Literal["user", "assistant", "system"]
    content: str | Listed[dict[str, Any]]


class CustomTool(ApiModel):
    policy = policies.MESSAGES_TOOL
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # True: shown to the model where a tool_reference stands

    def as_function(self) -> dict[str, Any]:
        own = self.model_dump(exclude_none=True, include={"name", "description", "strict"})
        return {"type": "function", "function": {**own, "parameters": self.input_schema}}


class Choice(ApiModel):
    policy = policies.MESSAGES_OPTIONS
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(ApiModel):
    policy = policies.MESSAGES_OPTIONS
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    policy = policies.MESSAGES_OPTIONS
    format: OutputFormat | None = None
    effort: Effort | None = None


def _without_hosted(tools: Any) -> Any:
    """Drop the tools that Anthropic defines or runs; they have a type other than custom."""
    if not isinstance(tools, list):
        return tools
    custom = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            log_ignored(logging.INFO, "/v1/messages", f"tools of type {kind!r:.60}", NOT_HOSTED)
        else:
            custom.append(tool)
    return custom


class CountRequest(ApiModel):
    """The fields of a request that determine its prompt."""

    policy = policies.MESSAGES
    messages: Listed[Turn] = Field(min_length=1)
    model: str | None = None
    system: str | Listed[dict[str, Any]] | None = None
    tools: Annotated[Listed[CustomTool], BeforeValidator(_without_hosted)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    def chat(self) -> AgentRequest:
        tools = self.tools or []
        functions = {tool.name: tool.as_function() for tool in tools}
        system = [] if self.system is None else _drop_billing(_blocks(self.system))
        messages = _messages("system", system, functions) if system else []
        paths = ["system"] * len(messages)
        for index, turn in enumerate(self.messages):
            messages += _messages(turn.role, turn.content, functions)
            paths += [f"messages[{index}].content"] * (len(messages) - len(paths))
        form, choice = self.output_config.format, self.tool_choice
        is_ours = (self.model or "").startswith(OUR_MODELS)
        fields: dict[str, Any] = {
            "model": None if is_ours else self.model,
            "messages": messages,
            "content_paths": paths,
            "tools": [tool.as_function() for tool in tools if not tool.defer_loading],
            "deferred_tools": [tool.as_function() for tool in tools if tool.defer_loading],
            "tool_choice": choice and _tool_choice(choice),
            "parallel_tool_calls": choice and not choice.disable_parallel_tool_use,
            "continue_final_message": _is_begun(self.messages[-1]),
            "reasoning_effort": self.output_config.effort,
            "thinking": self.thinking and {"type": self.thinking.type},
            "response_format": form and nested(form.model_dump(by_alias=True), "json_schema"),
        }
        return as_api_model(AgentRequest, fields | self._sampling())

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: Listed[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def _sampling(self) -> dict[str, Any]:
        return {"stop": self.stop_sequences, **self.model_dump(include=SAMPLING)}


def _is_begun(last: Turn) -> bool:
    """Return whether the completion continues the last turn instead of starting a new one."""
    blocks = _blocks(last.content)
    return last.role == "assistant" and bool(blocks) and blocks[-1].get("type") == "text"


def _tool_choice(choice: Choice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return "required" if choice.type == "any" else choice.type


def _drop_billing(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the first line of Claude Code's system text, which would make all prompts differ."""
    text = blocks[0].get("text") if blocks else None
    if not isinstance(text, str) or not text.startswith(BILLING):
        return blocks
    rest = text.partition("\n")[2]
    return [{**blocks[0], "text": rest}, *blocks[1:]] if rest else blocks[1:]


def _blocks(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _messages(role: str, content: Any, tools: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a turn to chat messages: first the tool results, then a message with the rest."""
    parts, reasoning, calls, results = [], [], [], []
    for block in _blocks(content):
        match block:
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                reasoning.append(text)
            case {"type": "redacted_thinking"} if role == "assistant":
                pass
            case {"type": "tool_use", "id": str(call_id), "name": str(name)} if role == "assistant":
                function = {"name": name, "arguments": block.get("input") or {}}
                calls.append({"type": "function", "id": call_id, "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id)} if role == "user":
                [result] = _messages("tool", block.get("content") or "", tools)
                results.append({**result, "tool_call_id": call_id})
            case {"type": "tool_reference", "tool_name": str(name)} if name in tools:
                text = json.dumps(tools[name], ensure_ascii=False)
                parts.append({"type": "text", "text": text})
            case _:  # text, or refused unless it is in the history
                parts.append(block)
    if results:  # what stands beside a result belongs to it, such as a file that a tool has read
        results[-1]["content"] += filter(is_image, parts)
        parts = [as_text(part) for part in parts if not is_image(part)]
        if not parts:
            return results
    message: dict[str, Any] = {"role": role, "content": parts}
    if reasoning:
        message["reasoning"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]
