"""The requests of Anthropic's API, and how they read as chats."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from nanovllm.errors import RequestError
from nanovllm.server.errors import ApiError
from nanovllm.server.openai_records import ChatRequest
from nanovllm.server.records import ApiRecord, Listed, as_record


class Turn(ApiRecord):
    role: Literal["user", "assistant"]
    content: str | Listed[dict[str, Any]]


class CustomTool(ApiRecord):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they come anyway

    def as_function(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class Choice(ApiRecord):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiRecord):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(ApiRecord):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiRecord):
    NOT_BUILT: ClassVar[tuple[str, ...]] = ("task_budget",)

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(ApiRecord):
    """What the prompt is made of."""

    NOT_BUILT: ClassVar[tuple[str, ...]] = ("container", "mcp_servers", "context_management")

    messages: Listed[Turn] = Field(min_length=1)
    model: str | None = None
    system: str | Listed[dict[str, Any]] | None = None
    tools: Listed[CustomTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None

    def as_chat(self, **sampling: Any) -> ChatRequest:
        messages = [] if self.system is None else [_message("system", self.system)]
        for turn in self.messages:
            results = _results(turn.content)
            messages += results
            is_all = 0 < len(results) == len(_blocks(turn.content))
            if turn.role == "assistant" or not is_all:
                messages.append(_message(turn.role, turn.content))
        fields: dict[str, Any] = {"model": self.model, "messages": messages, **sampling}
        if self.tools is not None:
            fields["tools"] = [tool.as_function() for tool in self.tools]
        if self.tool_choice is not None:
            fields["tool_choice"] = _tool_choice(self.tool_choice)
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            is_on = self.thinking.type != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": is_on}
        if _is_begun(self.messages[-1]):
            fields["continue_final_message"] = True
        return as_record(ChatRequest, {**fields, **_output_fields(self.output_config)})


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: Listed[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Any = None
    service_tier: Any = None
    thread: Any = None

    def chat(self) -> ChatRequest:
        if self.thread is not None:  # clients that are told so by this code go on without
            message = "thread is not supported by this server: send all messages"
            raise ApiError(message, param="thread", code="thread_unsupported_request")
        return self.as_chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream,
        )


def _output_fields(config: OutputConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    fields: dict[str, Any] = {"reasoning_effort": config.effort}
    if config.effort == "max":
        fields["reasoning_effort"] = "xhigh"
    if config.format is not None:
        schema = {"schema": config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _is_begun(last: Turn) -> bool:
    """An answer whose first words are given is continued."""
    blocks = _blocks(last.content)
    return last.role == "assistant" and bool(blocks) and blocks[-1].get("type") == "text"


def _tool_choice(choice: Choice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return "required" if choice.type == "any" else choice.type


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _message(role: str, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    """One message of a chat; results of tools have messages of their own."""
    texts, thoughts, calls = [], [], []
    for block in _blocks(content):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, "text"))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_text(block, "thinking"))
        elif kind == "tool_use" and role == "assistant":
            arguments = block.get("input")
            function = {"name": _text(block, "name"), "arguments": arguments or {}}
            calls.append({"type": "function", "id": _text(block, "id"), "function": function})
        elif kind != "tool_result" or role != "user":
            raise RequestError(f"messages: a {kind!r} block is not supported in {role} messages")
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _results(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "tool_call_id": _text(block, "tool_use_id"),
            "content": _message("tool", block.get("content") or "")["content"],
        }
        for block in _blocks(content)
        if block.get("type") == "tool_result"
    ]


def _text(block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"messages: {name} of a block must be a text, got {value!r:.80}")
    return value
