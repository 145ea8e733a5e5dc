"""Prepare chat requests: render and tokenize the prompt, and set up parsing of the output."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.assembly import require_feature
from nanovllm.engine.chat_template import choose_template
from nanovllm.engine.conversations import as_message, without_placeholders
from nanovllm.engine.detokenizer import num_held
from nanovllm.engine.images import ImageParts, PromptImage, outside_ids
from nanovllm.errors import GrammarError, RequestError, errors_about
from nanovllm.serve.chat_images import read_images
from nanovllm.serve.chat_turns import merge_turns, with_supported
from nanovllm.serve.generation import GenerationJob, Update
from nanovllm.serve.parsing.events import BlockEvent
from nanovllm.serve.parsing.parser import OutputParser
from nanovllm.serve.parsing.tool_grammar import CallRules, tool_grammar
from nanovllm.serve.parsing.tools import Tool, is_tool, read_tools
from nanovllm.serve.protocol import (
    AllowedTools,
    ChatFields,
    ChatRequest,
    DetokenizeRequest,
    Message,
    NamedTool,
    TokenizeRequest,
)
from nanovllm.serve.replay import EncodedPrompt, KeptReply, ReadReply, Reply, read_events
from nanovllm.serve.service import Service
from nanovllm.validation import require, require_text

# Template variables that chat_template_kwargs may not set.
RESERVED = (
    *("self", "conversation", "messages", "tools"),
    *("chat_template", "add_generation_prompt", "continue_final_message"),
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    encoded: EncodedPrompt
    # The ids of `encoded`, truncated if requested. Each token of an image has a placeholder.
    token_ids: list[int]
    tools: list[Tool]  # the tools that the model may call
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation rendered with the chat template, and its images."""

    text: str
    images: list[PromptImage]


async def prompt_of(service: Service, request: ChatRequest, param: str = "messages") -> ChatPrompt:
    """Validate a conversation, render it with the chat template, tokenize and truncate it."""
    service.check_model(request.model)
    tools = callable_tools(service, request)
    rendered = await render(service, request, tools and request.tools, param)
    read = reply_reader(service, request.all_tools)
    encoded = await service.encode_chat(rendered.text, request.cache_salt, read, param)
    if not rendered.images:
        return ChatPrompt(encoded, request.truncate(encoded.token_ids), tools)
    limit = request.truncate_prompt_tokens
    require(limit is None, "truncate_prompt_tokens", "omitted with images", limit)
    placed = await service.place_images(encoded.token_ids, rendered.images, param)
    return ChatPrompt(encoded, outside_ids(placed.token_ids, placed.images), tools, placed.images)


async def prepare_chat(
    service: Service, request: ChatRequest, param: str = "messages"
) -> GenerationJob:
    """Validate a chat request and return its job; errors about the prompt name `param`."""
    service.check_num_sequences(1, request.n or 1)
    prompt = await prompt_of(service, request, param)
    room = service.max_tokens(len(prompt.token_ids), None, None, param)
    overrides: dict[str, Any] = {"max_tokens": min(request.most_tokens or room, room)}
    if request.logprobs:
        overrides["logprobs"] = request.top_logprobs or 0
    reasoning, text = service.formats.reasoning, prompt.encoded.text
    is_open = reasoning is not None and reasoning.is_open(text, request.continued)
    with errors_about("tools", GrammarError):
        overrides["structured_outputs"] = await asyncio.to_thread(
            output_constraint, service, request, prompt.tools, text, is_open
        )
    hidden: Mapping[int, str] = {}
    if service.has_special_markers and request.skip_special_tokens is None:
        overrides["skip_special_tokens"] = False
        hidden = service.hidden_tokens
    params = request.sampling_params(service.options.sampling_defaults, **overrides)

    def new_parser() -> Callable[[Update], None]:
        formats = service.formats.tools, reasoning
        parser = OutputParser(prompt.tools, *formats, is_open, has_content=not request.must_call)
        choice = ChoiceParser(parser, hidden, service.reasoning_end_id)
        if request.add_generation_prompt is False or request.continued:
            return choice.parse  # not a whole reply
        return ReplyKeeper(service, prompt.encoded, choice).parse

    is_streaming = bool(request.stream) and params.prompt_logprobs is None
    has_own_grammar = request.constraint() is not None or not prompt.tools
    return GenerationJob(
        [prompt.token_ids],
        [params],
        request.cache_salt,
        is_streaming,
        request.grammar_param if has_own_grammar else "tools",
        new_parser,
        prompt.images,
    )


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    service.check_model(request.model)
    special, text, param = request.add_special_tokens, request.prompt, "prompt"
    images: list[PromptImage] = []
    if text is None:
        rendered, param = await render(service, request, request.tools), "messages"
        text, images = rendered.text, rendered.images
    elif special is None:
        special = True
    if not text:
        ids = []
    elif special:
        ids = await service.token_ids(text, param)
    else:
        read = reply_reader(service, request.tools or [])
        ids = (await service.encode_chat(text, None, read, param)).token_ids
    if images:
        placed = await service.place_images(ids, images, param)
        ids = outside_ids(placed.token_ids, placed.images)
    body = {"count": len(ids), "max_model_len": service.llm.max_len, "tokens": ids}
    if request.return_token_strs:
        body["token_strs"] = service.tokenizer.convert_ids_to_tokens(ids)
    return body


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    service.check_model(request.model)
    ids = await service.token_ids(request.tokens, "tokens") if request.tokens else []
    return {"prompt": await asyncio.to_thread(service.tokenizer.decode, ids)}


async def render(
    service: Service, chat: ChatFields, tools: Sequence[Any] | None, param: str = "messages"
) -> Rendered:
    """Render a conversation with the chat template, in a thread because it is slow."""
    variables = _variables(chat)
    with errors_about(param):
        read = await read_images(service, chat)
        rendered = await asyncio.to_thread(_render, service, chat, tools, variables, read)
        require_text(param, rendered.text)
    return rendered


def _render(
    service: Service,
    chat: ChatFields,
    tools: Sequence[Any] | None,
    variables: dict[str, Any],
    read: Mapping[tuple[int, int], Any],
) -> Rendered:
    if not service.chat_template:
        raise RequestError(
            "this model has no chat template; use /v1/completions or set --chat-template"
        )
    source = choose_template(service.chat_template, has_tools=bool(tools))
    has_developer = "developer" in service.template_text
    messages = [_as_template_message(message, has_developer) for message in chat.messages]
    images = ImageParts(service.llm.input_processor.image_reader.refusal)
    turns = with_supported(messages, chat.path, images.refusal, read)
    conversation = [as_message(turn, chat.path(i), images) for i, turn in enumerate(turns)]
    if images.sources:
        conversation = without_placeholders(service.llm.input_processor, conversation)
    names = {"add_generation_prompt", "continue_final_message"}
    variables = {
        "tools": tools or None,
        **service.tokenizer.special_tokens_map,
        **chat.model_dump(include=names, exclude_none=True),
        **variables,
    }
    template = service.compile_template(source)
    try:
        text = template.render(conversation, **variables)
    except RequestError:  # the template may want one system turn and alternating roles
        text = template.render(merge_turns(conversation), **variables)
    return Rendered(text, images.sources)


def _variables(chat: ChatFields) -> dict[str, Any]:
    """Return the extra template variables of a request."""
    variables = chat.template_variables()
    reserved = [name for name in variables if name in RESERVED]
    expected = f"without {', '.join(RESERVED)}"
    require(not reserved, "chat_template_kwargs", expected, reserved)
    return variables


def _as_template_message(message: Message, has_developer: bool) -> dict[str, Any]:
    written = message.model_dump(exclude_none=True)
    if message.role == "developer" and not has_developer:
        written["role"] = "system"
    if message.role == "assistant":
        written.setdefault("content", "")
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        written["reasoning"] = written["reasoning_content"] = reasoning
    return written


class ChoiceParser:
    """Parses the text of one choice, and counts its reasoning tokens."""

    def __init__(
        self, parser: OutputParser, hidden: Mapping[int, str], reasoning_end_id: int | None
    ) -> None:
        self._parser = parser
        self._visible = VisibleText(hidden)
        self._end_id = reasoning_end_id
        self._is_reasoning = reasoning_end_id is not None
        self._num_reasoning_tokens = 0

    def parse(self, update: Update) -> None:
        """Parse the text of an update and set its events; the parser may hold back text."""
        ids, is_over = update.token_ids, update.finish_reason is not None
        if self._is_reasoning:
            self._is_reasoning = self._end_id not in ids
            ids = ids if self._is_reasoning else ids[: ids.index(self._end_id) + 1]
            self._num_reasoning_tokens += len(ids)
        events = self._parser.feed(
            self._visible.feed(update.text, update.token_ids, has_more=not is_over)
        )
        if is_over:
            events += self._parser.finish(is_complete=update.finish_reason == "stop")
            if self._parser.has_reasoning:
                update.num_reasoning_tokens = self._num_reasoning_tokens
        update.events = events


class ReplyKeeper:
    """Parses one choice; if it ends with a stop token, keeps its token ids for later prompts."""

    def __init__(self, service: Service, prompt: EncodedPrompt, choice: ChoiceParser) -> None:
        self._service, self._prompt, self._choice = service, prompt, choice
        self._token_ids, self._events = array("i"), list[BlockEvent]()

    def parse(self, update: Update) -> None:
        self._choice.parse(update)
        self._token_ids.extend(update.token_ids)
        self._events.extend(update.events)
        is_stop_string = isinstance(update.stop_reason, str)
        if update.finish_reason != "stop" or is_stop_string or len(self._token_ids) < 2:
            return
        stop_id = self._token_ids.pop()
        # Clients never receive hidden tokens, so a reply must not bring them into later prompts.
        is_visible = self._service.hidden_tokens.keys().isdisjoint(self._token_ids)
        if is_visible and (stop := self._service.added_tokens.get(stop_id)):
            reply = KeptReply(read_events(self._events), self._token_ids, stop_id, stop)
            self._service.replays.keep(self._prompt, reply)


def reply_reader(service: Service, entries: Sequence[Any]) -> ReadReply:
    """Return a function that reads replies which may call these tools."""
    formats = service.formats
    tools = [tool for entry in entries if is_tool(entry) for tool in read_tools([entry])]

    def read(before: str, text: str) -> Reply:
        is_open = formats.reasoning is not None and formats.reasoning.is_open(before)
        parser = OutputParser(tools, formats.tools, formats.reasoning, is_open, new_id=str)
        return read_events([*parser.feed(text), *parser.finish()])

    return read


class VisibleText:
    """Removes the text of hidden special tokens; a token's id may arrive before its text.

    If ordinary tokens produce the same text, it may be removed from them instead.
    """

    def __init__(self, hidden: Mapping[int, str]) -> None:
        self._hidden = hidden
        self._due: deque[str] = deque()  # texts of hidden tokens that have not arrived yet
        self._held = ""  # text held back because it may be the start of a hidden token's text

    def feed(self, text: str, token_ids: Sequence[int], has_more: bool) -> str:
        if not self._hidden:
            return text
        self._due.extend(self._hidden[each] for each in token_ids if each in self._hidden)
        text, begin, pieces = self._held + text, 0, []
        while self._due and (at := text.find(self._due[0], begin)) >= 0:
            pieces.append(text[begin:at])
            begin = at + len(self._due.popleft())
        rest = text[begin:]
        end = len(rest) - (num_held(rest, tuple(self._due)[:1]) if has_more else 0)
        self._held = rest[end:]
        return "".join(pieces) + rest[:end]


def callable_tools(service: Service, request: ChatRequest) -> list[Tool]:
    """Validate the tools of a request; return those that the model may call."""
    choice, entries = request.tool_choice or "auto", request.all_tools
    if choice == "none" or (choice == "auto" and not entries):
        return []
    if not entries:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    if "tools" not in service.template_text:
        raise RequestError(
            "this model's chat template does not show tools to the model; set --chat-template to "
            "one that does, or omit tools",
            param="tools",
        )
    if service.formats.tools is None:
        raise RequestError(
            "the tool-call format of this model's chat template is unknown; set "
            "--tool-call-parser, or omit tools",
            param="tools",
        )
    tools = read_tools(entries)
    if isinstance(choice, str):
        return tools
    chosen = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
    names = [each.function["name"] for each in chosen]
    for name in names:
        if all(tool.name != name for tool in tools):
            message = f"tool_choice names {name!r}, which is not in tools"
            raise RequestError(message, param="tool_choice")
    return [tool for tool in tools if tool.name in names]


def output_constraint(
    service: Service, request: ChatRequest, tools: list[Tool], prompt: str, is_open: bool
) -> Mapping[str, Any] | None:
    """Return the `structured_outputs` that enforce tool calls or the requested format.

    `is_open` means that the output begins inside reasoning. Slow: call this in a thread.
    """
    reasoning = service.formats.reasoning
    if reasoning is not None and prompt.rstrip().endswith(reasoning.end):
        reasoning = None  # the prompt already ends the reasoning
    constraint = request.constraint()
    must_call = request.must_call
    is_parallel = request.parallel_tool_calls is not False
    if isinstance(request.tool_choice, NamedTool):  # called once by default, as in other servers
        is_parallel = request.parallel_tool_calls is True
    is_held = must_call or isinstance(request.tool_choice, AllowedTools) or not is_parallel
    if tools and (is_held or any(tool.is_strict for tool in tools)):
        if constraint is not None:
            message = "a response format and enforced tool calls cannot be combined; omit one"
            raise RequestError(message, param="tools")
        require_feature("grammar", "enforcing tool calls", GrammarError)
        from nanovllm.features.grammar.grammar_text import enforced_json
        from nanovllm.features.grammar.limits import run_bounded

        has_reasoning = reasoning is not None
        rules = CallRules(must_call, is_parallel, has_reasoning, service.special_ids, enforced_json)
        constraint = {"grammar": run_bounded(tool_grammar, service.formats.tools, tools, rules)}
    if constraint is None or reasoning is None or "after" in constraint:
        return constraint
    opening = {} if is_open else {"opened_by": reasoning.begin}
    return {**opening, "after": reasoning.end, **constraint}
