"""OpenAI's Responses API: /v1/responses. Stateless: each request contains the whole input."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field

from nanovllm.engine.conversations import text_of
from nanovllm.errors import NanovllmError, RequestError
from nanovllm.serve import fields as policies
from nanovllm.serve.chat_turns import PART_NAMES, left_out
from nanovllm.serve.generation import ApiResponse, GenerationJob, Update
from nanovllm.serve.http_errors import message_of
from nanovllm.serve.http_responses import Event
from nanovllm.serve.openai.openai_logprobs import Entry, TokenLogprobs, covering, logprob_entries
from nanovllm.serve.openai.response_tools import SEARCH, ResponseTool, flat_name, read_tools
from nanovllm.serve.parsing.events import BlockDelta, BlockStart, BlockStop
from nanovllm.serve.parsing.tools import is_tool
from nanovllm.serve.prepare_chat import prepare_chat
from nanovllm.serve.protocol import (
    MAX_TOP_LOGPROBS,
    AgentRequest,
    ApiModel,
    Listed,
    ReasoningOptions,
    as_api_model,
    nested,
)
from nanovllm.serve.service import Service
from nanovllm.validation import require

SHARED = {"model", "temperature", "top_p", "seed", "parallel_tool_calls", "stream"}
INCLUDED_LOGPROBS = "message.output_text.logprobs"
ROLES = ("user", "assistant", "system", "developer")
TEXT_TYPES = ("input_text", "output_text", "text")
REASONING_TYPES = ("reasoning_text", "summary_text", "text")
ADDED_TOOLS = ("tool_search_output", "additional_tools")  # items that contain tools
KNOWN_ITEMS = (
    *("message", "reasoning", "compaction", *ADDED_TOOLS),
    *("function_call", "custom_tool_call", "tool_search_call"),
    *("function_call_output", "custom_tool_call_output"),
)
# Kind of content block -> (prefix of its item's id, initial fields of the item).
ITEMS: dict[str, tuple[str, Event]] = {
    "text": ("msg_", {"type": "message", "role": "assistant", "content": []}),
    "reasoning": ("rs_", {"type": "reasoning", "summary": [], "content": []}),
}
# Kind of content block -> name in its events (response.NAME.delta); for text and reasoning, also
# the type of the content part.
CONTENT = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "tool_call": "function_call_arguments",
}


async def create_response(service: Service, request: ResponsesRequest) -> ResponsesResponse:
    tools = request.read_tools()
    job = await prepare_chat(service, request.chat(tools), "input")
    if request.has_logprobs:  # only streamed updates relate tokens to content blocks
        job = replace(job, is_streaming=True)
    return ResponsesResponse(service, job, request, tools)


class ResponsesResponse(ApiResponse):
    has_names = True

    def __init__(
        self,
        service: Service,
        job: GenerationJob,
        request: ResponsesRequest,
        tools: Mapping[str, ResponseTool],
    ) -> None:
        super().__init__(service, job)
        self._tools = tools  # keyed by the name that the model sees
        self._output: list[Event] = []  # the finished items
        self._tokens: list[TokenLogprobs] = []  # tokens whose text has not been emitted yet
        self._num_events = 0
        self._num_top = request.top_logprobs or 0
        self.is_large = request.has_logprobs  # the last events repeat the logprobs of all tokens
        params = job.params[0]
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
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": request.text.format or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": self._num_top,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    def render(self, update: Update) -> Iterator[Event]:
        if not self._num_events:
            yield self._event("response.created", response=self._snapshot())
            yield self._event("response.in_progress", response=self._snapshot())
        yield from self._render(update)
        if update.finish_reason is not None:
            yield self._finish(update.finish_reason)

    def whole(self, events: list[Event]) -> Event:
        response: Event = events[-1]["response"]
        return response

    def error(self, error: NanovllmError) -> Event:
        body = {"code": error.code or "server_error", "message": message_of(error)}
        self._response |= {"status": "failed", "error": body}
        return self._event("response.failed", response=self._snapshot())

    def _event(self, name: str, **fields: Any) -> Event:
        event = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _snapshot(self) -> Event:
        return {**self._response, "output": list(self._output)}

    def _render(self, update: Update) -> Iterator[Event]:
        if update.logprobs:
            self._tokens += zip(update.token_ids, update.logprobs, strict=True)
        # Attribute all collected tokens to the last start or delta of this update.
        pieces = [each for each in update.events if not isinstance(each, BlockStop)]
        for event in update.events:
            tokens: Sequence[TokenLogprobs] = self._tokens if event in pieces[-1:] else ()
            match event:
                case BlockStart():
                    yield from self._start(event)
                case BlockDelta(text=text):
                    yield from self._delta(text, tokens)
                case BlockStop(is_complete=is_complete):
                    yield from self._stop(is_complete)
        if update.events:
            self._tokens = []

    def _start(self, block: BlockStart) -> Iterator[Event]:
        self._kind, self._text = block.kind, ""
        self._logprobs: list[TokenLogprobs] = []  # logprobs of the block's text, if requested
        self._tool = self._tools[block.name] if block.kind == "tool_call" else None
        prefix, fields = (
            ITEMS[block.kind] if self._tool is None else self._tool.start(block.call_id)
        )
        self._item = {"id": prefix + uuid4().hex, "status": "in_progress", **fields}
        self._place = {"item_id": self._item["id"], "output_index": block.index}
        yield self._event("response.output_item.added", output_index=block.index, item=self._item)
        if self._tool is None:
            self._place["content_index"] = 0
            yield self._event("response.content_part.added", **self._place, part=self._part())

    def _delta(self, text: str, tokens: Sequence[TokenLogprobs]) -> Iterator[Event]:
        if not self._text:
            tokens = covering(self.service.tokenizer, tokens, text)
        self._text += text
        self._logprobs += tokens
        if self._tool is None or self._tool.kind == "function":  # other calls are sent whole
            yield self._content_event("delta", tokens, delta=text)

    def _stop(self, is_complete: bool) -> Iterator[Event]:
        item = self._item | {"status": "completed" if is_complete else "incomplete"}
        if self._tool is None:
            item["content"] = [self._part()]
            yield self._content_event("done", self._logprobs, text=self._text)
            yield self._event("response.content_part.done", **self._place, part=self._part())
        else:
            item |= (fields := self._tool.finish(self._text))
            if self._tool.kind == "custom":
                name = "response.custom_tool_call_input.done"
                yield self._event(name, **self._place, **fields)
            elif self._tool.kind == "function":
                yield self._content_event("done", (), **fields)
        index = len(self._output)
        self._output.append(item)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _content_event(self, what: str, tokens: Sequence[TokenLogprobs], **fields: Any) -> Event:
        if self._kind == "text":
            fields["logprobs"] = self._entries(tokens)
        return self._event(f"response.{CONTENT[self._kind]}.{what}", **self._place, **fields)

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": CONTENT[self._kind], "text": self._text}
        if self._kind == "text":
            part |= {"annotations": [], "logprobs": self._entries(self._logprobs)}
        return part

    def _entries(self, tokens: Sequence[TokenLogprobs]) -> list[Entry]:
        return logprob_entries(self.service.tokenizer, tokens, self._num_top)

    def _finish(self, reason: str) -> Event:
        usage = self.usage
        # OpenAI counts tokens written to its prompt cache in cache_write_tokens; here it is 0.
        cached = {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0}
        status = "completed" if reason == "stop" else "incomplete"
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


class TextOptions(ApiModel):
    policy = policies.RESPONSES_TEXT
    format: dict[str, Any] | None = None


class ResponsesRequest(ApiModel):
    """A request of the Responses API; `chat` validates the fields that chat requests have too."""

    policy = policies.RESPONSES
    input: str | Listed[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None  # vLLM's extension; set for the rows of batch jobs
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    stream: bool | None = None
    include: Any = None
    metadata: Any = None  # the response repeats this field and the next one
    user: Any = None

    @property
    def has_logprobs(self) -> bool:
        is_included = isinstance(self.include, list) and INCLUDED_LOGPROBS in self.include
        return self.top_logprobs is not None or is_included

    def read_tools(self) -> dict[str, ResponseTool]:
        """Return the tools of the request and of the history by the names that the model sees."""
        items = self.input if isinstance(self.input, list) else []
        added = [tool for item in items for tool in _found_tools(item)]
        return {tool.flat_name: tool for tool in (*added, *read_tools(self.tools or []))}

    def chat(self, tools: Mapping[str, ResponseTool]) -> AgentRequest:
        messages = _messages(self.input)
        if self.instructions is not None:
            system = {"role": "system", "content": self.instructions, "path": "instructions"}
            messages.insert(0, system)
        require(messages, "input", "at least one item", self.input)
        own_tools = list(read_tools(self.tools or []))
        listed = [tool.function for tool in own_tools if not tool.is_deferred]
        names = {tool.flat_name for tool in own_tools if not tool.is_deferred}
        fields = self.model_dump(include=SHARED) | {
            "content_paths": [message.pop("path") for message in messages],
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "enable_thinking": self.reasoning.enabled,
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs,
            "tools": listed,
            "deferred_tools": [each.function for name, each in tools.items() if name not in names],
            "tool_choice": _tool_choice(self.tool_choice),
            "response_format": nested(self.text.format, "json_schema"),
        }
        return as_api_model(AgentRequest, fields)


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    """Convert a tool choice to the chat format."""
    if not isinstance(choice, dict):
        return choice
    if isinstance(choice.get("tools"), list):
        choice = {**choice, "tools": [_tool_choice(tool) for tool in choice["tools"]]}
    elif choice.get("type") in ("custom", SEARCH) or "namespace" in choice:
        name = flat_name(choice.get("name", SEARCH), choice.get("namespace"))
        choice = {"type": "function", "name": name}
    return nested(choice, str(choice.get("type")))


def _found_tools(item: dict[str, Any]) -> list[ResponseTool]:
    """Return the tools that an item of the history adds, without malformed ones."""
    tools = item.get("tools") if item.get("type") in ADDED_TOOLS else None
    added = read_tools(tools) if isinstance(tools, list) else ()
    return [tool for tool in added if is_tool(tool.function)]


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert input items to chat messages; consecutive assistant items are merged.

    Each message has its `path` in the request, for errors.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items, "path": "input"}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        path = f"input[{index}].content"
        message = _message(item, path)
        before = messages[-1] if messages else {}
        if message["role"] == before.get("role") == "assistant":
            for name in message.keys() - {"role"}:
                before[name] = before[name] + message[name] if name in before else message[name]
        else:
            messages.append(message | {"path": path})
    if items and all(_is_unknown(item) for item in items):
        raise _unsupported(items[0])
    return messages


def _message(item: dict[str, Any], path: str) -> dict[str, Any]:
    kind, call_id = item.get("type", "message"), item.get("call_id")
    match {"type": "message", **item}:
        case {"type": "message", "role": str(role)} if role in ROLES:
            if role == "assistant":
                return {"role": role, "content": _content(item.get("content") or "", path)}
            return {"role": role, "content": _parts(item.get("content"), path)}
        case {"type": "reasoning"}:
            parts = item.get("content") or item.get("summary") or []
            return {"role": "assistant", "reasoning": _content(parts, path, REASONING_TYPES)}
        case {"type": "function_call", "name": str(), "arguments": str(arguments)}:
            return _call(item, arguments)
        case {"type": "custom_tool_call", "name": str(), "input": str(text)}:
            return _call(item, json.dumps({"input": text}, ensure_ascii=False))
        case {"type": "tool_search_call", "arguments": dict(arguments)}:
            arguments = json.dumps(arguments, ensure_ascii=False)
            return _call({**item, "name": SEARCH}, arguments)
        case {"type": "tool_search_output" | "additional_tools"}:
            texts = [json.dumps(tool.function, ensure_ascii=False) for tool in _found_tools(item)]
            role = "developer" if call_id is None else "tool"
            text = "\n".join(texts) or "no tools were found"
            return {"role": role, "tool_call_id": call_id, "content": text}
        case {"type": "function_call_output" | "custom_tool_call_output"}:
            output = item.get("output") or ""
            if isinstance(output, dict):
                output = json.dumps(output, ensure_ascii=False)
            content = _parts(output, path.replace("content", "output"))
            return {"role": "tool", "tool_call_id": call_id, "content": content}
        case {"type": "message" | "function_call" | "custom_tool_call" | "tool_search_call"}:
            pass  # malformed
        case {"type": str(kind)} if kind.endswith("_output"):
            return {"role": "tool", "tool_call_id": call_id, "content": left_out(item)}
        case {"type": str(kind)} if kind in PART_NAMES:
            return {"role": "user", "content": [item]}  # refused unless it is in the history
        case {"type": str()}:
            return {"role": "assistant", "content": left_out(item)}
    raise _unsupported(item)


def _is_unknown(item: dict[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind not in KNOWN_ITEMS and kind not in PART_NAMES


def _unsupported(item: dict[str, Any]) -> RequestError:
    text = f"input: an item of this form is not supported: {item!r:.80}"
    return RequestError(text, param="input")


def _call(item: dict[str, Any], arguments: str) -> dict[str, Any]:
    function = {"name": flat_name(item["name"], item.get("namespace")), "arguments": arguments}
    call = {"type": "function", "id": item.get("call_id"), "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _content(content: Any, path: str, types: Sequence[str] = TEXT_TYPES) -> str:
    """Return an assistant item's content as text: such items in a row are joined."""
    if isinstance(content, list):
        content = [
            part if _is_text(part, types) else {"type": types[0], "text": left_out(part)}
            for part in content
        ]
    return text_of(content, path, types)


def _parts(content: Any, path: str) -> str | list[dict[str, Any]]:
    """Return content as text if possible, else as parts of the chat API."""
    if not isinstance(content, list) or all(map(_is_text, content)):
        return text_of(content, path, TEXT_TYPES)
    return [
        {"type": "text", "text": text_of([part], path, TEXT_TYPES)} if _is_text(part) else part
        for part in content
    ]


def _is_text(part: Any, types: Sequence[str] = TEXT_TYPES) -> bool:
    return not isinstance(part, dict) or part.get("type", "text") in types
