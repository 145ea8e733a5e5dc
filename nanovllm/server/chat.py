"""A conversation to answer: its prompt, and how the text of its answer is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nanovllm.engine.detokenizer import num_held
from nanovllm.engine.front import check_text
from nanovllm.errors import GrammarError
from nanovllm.server.chat_prompt import render_chat
from nanovllm.server.errors import about
from nanovllm.server.generation import Job, Update, generate
from nanovllm.server.openai_records import ChatRequest
from nanovllm.server.parsing.parser import OutputParser
from nanovllm.server.parsing.tools import Tool
from nanovllm.server.service import Service
from nanovllm.server.tool_choice import answer_constraint, callable_tools


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    token_ids: list[int]
    tools: list[Tool]  # that the model may call


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that was checked and can be answered."""

    job: Job
    new_parser: Callable[[], OutputParser]
    hidden: Mapping[int, str]  # special tokens whose text is not shown


async def prompt_of(service: Service, request: ChatRequest, param: str = "messages") -> ChatPrompt:
    """Check a conversation, write it as the model's template does, and tokenise it."""
    service.check_model(request.model)
    tools = callable_tools(service, request)
    text = await asyncio.to_thread(render_chat, service, request, tools and request.tools)
    check_text("a message", text)
    token_ids = await service.token_ids(text, param, add_special_tokens=False)
    if request.truncate_prompt_tokens is not None and request.truncate_prompt_tokens > 0:
        token_ids = token_ids[-request.truncate_prompt_tokens :]
    return ChatPrompt(text, token_ids, tools)


async def prepare_chat(service: Service, request: ChatRequest, param: str = "messages") -> Chat:
    """Check everything that can be checked before the answer begins; `param` has the prompt."""
    service.check_num_sequences(1, request.n or 1)
    prompt = await prompt_of(service, request, param)
    length = service.answer_length(len(prompt.token_ids), request.most_tokens, None, param)
    given: dict[str, Any] = {"max_tokens": length}
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    reasoning = service.formats.reasoning
    is_open = reasoning is not None and reasoning.is_open(prompt.text, request.continued)
    constrain = partial(answer_constraint, service, request, prompt.tools, prompt.text, is_open)
    grammar_param = request.grammar_param
    if prompt.tools:
        grammar_param = "tools" if request.constraint() is None else grammar_param
        try:
            given["structured_outputs"] = await asyncio.to_thread(constrain)
        except GrammarError as error:
            raise about("tools", error) from error
    else:
        given["structured_outputs"] = constrain()
    hidden: Mapping[int, str] = {}
    if service.has_special_markers and request.skip_special_tokens is None:
        given["skip_special_tokens"] = False
        hidden = service.hidden_tokens
    params = request.sampling_params(service.options.sampling_defaults, **given)
    is_streaming = bool(request.stream) and params.prompt_logprobs is None
    job = Job([prompt.token_ids], [params], request.cache_salt, is_streaming, grammar_param)

    def new_parser() -> OutputParser:
        found = prompt.tools, service.formats.tools, reasoning, is_open
        return OutputParser(*found, has_content=not request.must_call)

    return Chat(job, new_parser, hidden)


async def chat_updates(service: Service, chat: Chat) -> AsyncGenerator[Update, None]:
    """Generate the completions of a chat and parse them; a parser may hold back text."""
    choices = [_Choice(service, chat) for _ in range(chat.job.num_choices)]
    async with contextlib.aclosing(generate(service, chat.job)) as updates:
        async for update in updates:
            yield choices[update.choice].parse(update)


class _Choice:
    """Parses the text of one choice, and counts its tokens up to the end of reasoning."""

    def __init__(self, service: Service, chat: Chat) -> None:
        self._parser = chat.new_parser()
        self._visible = VisibleText(chat.hidden)
        self._end_id = service.reasoning_end_id
        self._is_reasoning = self._end_id is not None
        self._num_reasoning_tokens = 0

    def parse(self, update: Update) -> Update:
        ids, finish = update.token_ids, update.finish
        if self._is_reasoning:
            self._is_reasoning = self._end_id not in ids
            ids = ids if self._is_reasoning else ids[: ids.index(self._end_id) + 1]
            self._num_reasoning_tokens += len(ids)
        events = self._parser.feed(
            self._visible.feed(update.text, update.token_ids, finish is None)
        )
        if finish is None:
            return replace(update, events=events)
        events += self._parser.finish(is_complete=finish.reason == "stop")
        num_tokens = self._num_reasoning_tokens if self._parser.has_reasoning else 0
        return replace(update, events=events, num_reasoning_tokens=num_tokens)


class VisibleText:
    """Removes the text of hidden tokens, whose ids may come before their text.

    The same text written with other tokens may be taken for a hidden token.
    """

    def __init__(self, hidden: Mapping[int, str]) -> None:
        self._hidden = hidden
        self._due: deque[str] = deque()  # texts of hidden tokens that are yet to come
        self._held = ""  # may be the beginning of such a text

    def feed(self, text: str, token_ids: Sequence[int], has_more: bool) -> str:
        self._due.extend(self._hidden[each] for each in token_ids if each in self._hidden)
        text, begin, pieces = self._held + text, 0, []
        while self._due and (at := text.find(self._due[0], begin)) >= 0:
            pieces.append(text[begin:at])
            begin = at + len(self._due.popleft())
        rest = text[begin:]
        end = len(rest) - (num_held(rest, tuple(self._due)[:1]) if has_more else 0)
        self._held = rest[end:]
        return "".join(pieces) + rest[:end]
