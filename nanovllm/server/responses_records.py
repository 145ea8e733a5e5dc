"""The requests of OpenAI's responses API, and how they read as chats."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from nanovllm.errors import RequestError
from nanovllm.server.openai_records import ChatRequest, Effort
from nanovllm.server.records import MAX_TOP_LOGPROBS, ApiRecord, Harmless, Listed, as_record

INCLUDED_LOGPROBS = "message.output_text.logprobs"
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")


class FunctionTool(ApiRecord):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_function(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": self.model_dump(exclude_none=True, exclude={"type"}),
        }


class NamedFunctionTool(ApiRecord):
    type: Literal["function"]
    name: str


class AllowedFunctionTools(ApiRecord):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Listed[NamedFunctionTool] = Field(min_length=1)


class TextFormat(ApiRecord):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def as_response_format(self) -> dict[str, Any]:
        if self.type != "json_schema" and self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"schema": self.schema_}}


class TextOptions(ApiRecord):
    NOT_BUILT: ClassVar[tuple[str, ...]] = ("verbosity",)

    format: TextFormat | None = None


FunctionChoice = Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools


class StreamOptions(ApiRecord):
    include_obfuscation: bool | None = None  # of the lengths of pieces: there is none


class ReasoningOptions(ApiRecord):
    effort: Effort | None = None
    summary: str | None = None  # reasoning is given whole
    generate_summary: str | None = None


class ResponsesRequest(Harmless):
    NOT_BUILT: ClassVar[tuple[str, ...]] = (
        *("previous_response_id", "conversation", "prompt", "max_tool_calls"),
        "context_management",
    )

    input: str | Listed[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    seed: int | None = None  # vLLM's addition; rows of a batch need one
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Listed[FunctionTool] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def has_logprobs(self) -> bool:
        is_included = isinstance(self.include, list) and INCLUDED_LOGPROBS in self.include
        return self.top_logprobs is not None or is_included

    def chat(self) -> ChatRequest:
        messages = [*self._instructions(), *_messages(self.input)]
        if not messages:
            raise RequestError("input must have an item, got none")
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "user": self.user,
            "stream": self.stream,
        }
        if self.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.tools is not None:
            fields["tools"] = [tool.as_function() for tool in self.tools]
        fields["tool_choice"] = _tool_choice(self.tool_choice)
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.as_response_format()
        return as_record(ChatRequest, fields)

    def _instructions(self) -> list[dict[str, Any]]:
        if self.instructions is None:
            return []
        return [{"role": "system", "content": self.instructions}]


def _tool_choice(choice: FunctionChoice | None) -> Any:
    """As chats have it."""
    if isinstance(choice, NamedFunctionTool):
        return {"type": choice.type, "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctionTools):
        allowed = {"mode": choice.mode, "tools": [_tool_choice(tool) for tool in choice.tools]}
        return {"type": choice.type, "allowed_tools": allowed}
    return choice


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reasoning, text and calls of one answer come as items, and become one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        message = _message(item)
        before = messages[-1] if messages else {}
        if message["role"] == before.get("role") == "assistant":
            for name in message.keys() - {"role"}:
                before[name] = before[name] + message[name] if name in before else message[name]
        else:
            messages.append(message)
    return messages


def _message(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in ROLES:
            known = ", ".join(ROLES)
            raise RequestError(
                f"input: a role must be one of {known}, got {item.get('role')!r:.80}"
            )
        return {"role": item["role"], "content": _text(item.get("content"))}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return {"role": "assistant", "reasoning": _text(parts, ("reasoning_text", "summary_text"))}
    if kind == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        for name, value in function.items():
            if not isinstance(value, str):
                raise RequestError(f"input: {name} of a call must be a text, got {value!r:.80}")
        call = {"type": "function", "id": item.get("call_id"), "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _text(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise RequestError(f"input: items of type {kind!r} are not supported")


def _text(content: Any, kinds: tuple[str, ...] = TEXT_PARTS) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
        if not isinstance(text, str):
            raise RequestError(f"input: only text parts are supported, got {part!r:.80}")
        texts.append(text)
    return "\n".join(texts)
