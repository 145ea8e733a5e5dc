"""/v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.outputs import Logprob
from nanovllm.server.answer import Event
from nanovllm.server.chat import Chat, ChatUpdate, chat_updates, prepare_chat
from nanovllm.server.completions import prompt_logprobs_by_id
from nanovllm.server.generation import Update
from nanovllm.server.openai_records import ChatRequest
from nanovllm.server.openai_stream import OpenAIStream
from nanovllm.server.parsing import events as parsed
from nanovllm.server.service import Service
from nanovllm.server.token_bytes import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK, WHOLE = "chat.completion.chunk", "chat.completion"
Entry = Callable[[], dict[str, Any]]
OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")


async def answer_chat(service: Service, request: ChatRequest) -> ChatAnswer:
    return ChatAnswer(service, await prepare_chat(service, request), request)


class ChatAnswer(OpenAIStream):
    request: ChatRequest

    def __init__(self, service: Service, chat: Chat, request: ChatRequest) -> None:
        super().__init__(service, chat.job, request, "chatcmpl")
        self._chat = chat
        self._is_begun = [False] * chat.job.num_choices
        self._has_calls = [False] * chat.job.num_choices

    async def events(self) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(chat_updates(self.service, self._chat)) as updates:
            async for each in updates:
                self.usage.add(each.update, each.num_reasoning_tokens)
                of_prompt = self._of_prompt(each.update)
                choice = self._choice(each)
                news = (choice["delta"], choice["logprobs"], choice.get("token_ids"))
                if any(news) or each.update.finish is not None:
                    yield self.chunk(CHUNK, [choice]) | of_prompt
        for event in self.last_chunk(CHUNK):
            yield event

    def whole(self, events: list[Event]) -> Event:
        choices = [_whole(choice) for event in events for choice in event["choices"]]
        body = self.body(WHOLE, sorted(choices, key=lambda choice: choice["index"]))
        return body | {name: event[name] for event in events for name in OF_PROMPT if name in event}

    def _of_prompt(self, update: Update) -> Event:
        """What was asked for of the prompt: beside the choices, which all have the same."""
        facts: Event = {}
        if self.request.return_token_ids and not any(self._is_begun):
            facts["prompt_token_ids"] = list(self.job.prompts[0])
        if self.request.prompt_logprobs is not None and update.finish is not None:
            entries = update.finish.prompt_logprobs
            facts["prompt_logprobs"] = partial(prompt_logprobs_by_id, entries)
        return facts

    def _choice(self, each: ChatUpdate) -> dict[str, Any]:
        update, finish = each.update, each.update.finish
        index = update.choice
        delta = delta_of(each.events)
        if not self._is_begun[index]:
            delta = {"role": "assistant", "content": "", **delta}
            self._is_begun[index] = True
        self._has_calls[index] |= "tool_calls" in delta
        reason = None if finish is None else finish.reason
        if reason == "stop" and self._has_calls[index] and not _is_cut(each):
            reason = "tool_calls"
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": None if finish is None else finish.stop_reason,
        }
        if self.request.logprobs:
            choice["logprobs"] = {"content": partial(self._logprob_entries, update)}
        if self.request.return_token_ids:
            choice["token_ids"] = list(update.token_ids)
        return choice

    def _logprob_entries(self, update: Update) -> list[Entry]:
        pairs = zip(update.token_ids, update.logprobs or (), strict=bool(update.logprobs))
        return logprob_entries(self.service.tokenizer, pairs, self.request.top_logprobs or 0)


def _is_cut(each: ChatUpdate) -> bool:
    """Whether a stop string came within a call, which therefore cannot be followed."""
    finish, last = each.update.finish, each.events[-1] if each.events else None
    if finish is None or finish.reason != "stop" or not isinstance(finish.stop_reason, str):
        return False
    return isinstance(last, parsed.CallEnded) and not last.is_complete


def logprob_entries(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Iterable[tuple[int, dict[int, Logprob]]],
    num_best: int,
) -> list[Entry]:
    """The logprobs of each token and its top logprobs, computed one by one while encoding."""

    def entry(token_id: int, known: dict[int, Logprob]) -> dict[str, Any]:
        best = [
            _logprob(tokenizer, each, logprob)
            for each, logprob in known.items()
            if logprob.rank <= num_best
        ]
        return {**_logprob(tokenizer, token_id, known[token_id]), "top_logprobs": best}

    return [partial(entry, token_id, known) for token_id, known in tokens]


def delta_of(events: list[parsed.Event]) -> dict[str, Any]:
    """Write what a piece of text means as a message, or a part of one."""
    content = "".join(each.text for each in events if isinstance(each, parsed.Content))
    reasoning = "".join(each.text for each in events if isinstance(each, parsed.Reasoning))
    calls: dict[int, dict[str, Any]] = {}
    for each in events:
        if isinstance(each, parsed.CallBegun):
            function = {"name": each.name, "arguments": ""}
            calls[each.index] = {
                "index": each.index,
                "id": each.id,
                "type": "function",
                "function": function,
            }
        elif isinstance(each, parsed.CallArguments):
            continued = {"index": each.index, "function": {"arguments": ""}}
            call = calls.setdefault(each.index, continued)
            call["function"]["arguments"] += each.text
    delta: dict[str, Any] = {}
    if content:
        delta["content"] = content
    if reasoning:
        delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice that came in one piece, as a message."""
    delta = choice.pop("delta")
    calls = [
        {name: value for name, value in call.items() if name != "index"}
        for call in delta.get("tool_calls", ())
    ]
    delta = {"refusal": None, **delta, "tool_calls": calls} if calls else {"refusal": None, **delta}
    if calls and not delta["content"]:
        delta["content"] = None
    return {"index": choice.pop("index"), "message": delta, **choice}


def _logprob(tokenizer: PreTrainedTokenizerBase, token_id: int, logprob: Logprob) -> dict[str, Any]:
    token = logprob.decoded_token or ""
    return {
        "token": token,
        "logprob": logprob.logprob,
        "bytes": list(token_bytes(tokenizer, token_id, token)),
    }
