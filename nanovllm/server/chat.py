"""A conversation to answer: its prompt, and how the text of its answer is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.front import check_text
from nanovllm.server.chat_prompt import render_chat
from nanovllm.server.generation import Job, Update, generate
from nanovllm.server.openai_records import ChatRequest
from nanovllm.server.parsing.events import Event
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


@dataclass(frozen=True, slots=True)
class ChatUpdate:
    """What is new of one choice, and what its text means."""

    update: Update
    events: list[Event]


async def prompt_of(service: Service, request: ChatRequest) -> ChatPrompt:
    """Check a conversation, write it as the model's template does, and tokenise it."""
    service.check_model(request.model)
    tools = callable_tools(service, request)
    text = await asyncio.to_thread(render_chat, service, request, tools and request.tools)
    check_text("a message", text)
    token_ids = await service.token_ids(text, add_special_tokens=False)
    if request.truncate_prompt_tokens is not None and request.truncate_prompt_tokens > 0:
        token_ids = token_ids[-request.truncate_prompt_tokens :]
    return ChatPrompt(text, token_ids, tools)


async def prepare_chat(service: Service, request: ChatRequest, param: str = "messages") -> Chat:
    """Check everything that can be checked before the answer begins; `param` has the prompt."""
    prompt = await prompt_of(service, request)
    length = service.answer_length(len(prompt.token_ids), request.most_tokens, None, param)
    given: dict[str, Any] = {"max_tokens": length}
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    given["structured_outputs"] = answer_constraint(service, request, prompt.tools, prompt.text)
    hidden: Mapping[int, str] = {}
    if service.has_special_markers and request.skip_special_tokens is None:
        given["skip_special_tokens"] = False
        hidden = service.hidden_tokens
    params = request.sampling_params(service.options.sampling_defaults, **given)
    is_streaming = bool(request.stream) and params.prompt_logprobs is None
    job = Job([prompt.token_ids], [params], request.cache_salt, is_streaming)
    formats = service.formats
    is_open = formats.reasoning is not None and formats.reasoning.is_open(prompt.text)

    def new_parser() -> OutputParser:
        found = prompt.tools, formats.tools, formats.reasoning, is_open
        return OutputParser(*found, has_content=not request.must_call)

    return Chat(job, new_parser, hidden)


async def chat_updates(service: Service, chat: Chat) -> AsyncGenerator[ChatUpdate, None]:
    """Answer a conversation; what a parser holds back comes with a later update."""
    parsers = [chat.new_parser() for _ in range(chat.job.num_choices)]
    async with contextlib.aclosing(generate(service, chat.job)) as updates:
        async for update in updates:
            events = parsers[update.choice].feed(_shown(update, chat.hidden))
            if update.finish is not None:
                events += parsers[update.choice].finish()
            yield ChatUpdate(update, events)


def _shown(update: Update, hidden: Mapping[int, str]) -> str:
    """The text without that of each hidden token, of which the last occurrence is taken off.

    What looks like one but was written with other tokens stays.
    """
    text = update.text
    for token_id in update.token_ids if hidden else ():
        if token_id in hidden:
            text = "".join(text.rsplit(hidden[token_id], 1))
    return text
