"""OpenAI's chat API: /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from nanovllm.serve.generation import GenerationJob, Update
from nanovllm.serve.http_responses import Event
from nanovllm.serve.openai.completions import OpenAIResponse
from nanovllm.serve.openai.openai_logprobs import Entry, logprob_entries, prompt_logprobs_by_id
from nanovllm.serve.parsing.events import BlockDelta, BlockEvent, BlockStart, BlockStop
from nanovllm.serve.prepare_chat import prepare_chat
from nanovllm.serve.protocol import ChatRequest
from nanovllm.serve.service import Service

OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")


async def create_chat_completion(service: Service, request: ChatRequest) -> ChatResponse:
    return ChatResponse(service, await prepare_chat(service, request), request)


class ChatResponse(OpenAIResponse):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, service: Service, job: GenerationJob, request: ChatRequest) -> None:
        super().__init__(service, job, request)
        self._num_calls = [0] * job.num_choices

    def chunk(self, update: Update) -> Event:
        fields = self._prompt_fields(update)
        choice = self._choice(update)
        news = (choice["delta"], choice["logprobs"], choice.get("token_ids"), update.finish_reason)
        return {"choices": [choice], **fields} if any(news) else {}

    def whole(self, events: list[Event]) -> Event:
        body = super().whole(events)
        body["choices"] = list(map(_whole, body["choices"]))
        return body | {name: event[name] for event in events for name in OF_PROMPT if name in event}

    def _prompt_fields(self, update: Update) -> Event:
        """Return the requested fields of the prompt, which all choices share."""
        fields: Event = {}
        if self.request.return_token_ids and not any(self.is_begun):
            fields["prompt_token_ids"] = list(self.job.prompts[0])
        if self.request.prompt_logprobs is not None and update.finish_reason is not None:
            fields["prompt_logprobs"] = partial(prompt_logprobs_by_id, update.prompt_logprobs)
        return fields

    def _choice(self, update: Update) -> dict[str, Any]:
        index, reason = update.choice, update.finish_reason
        delta = self._delta(index, update.events)
        if not self.is_begun[index]:
            delta = {"role": "assistant", "content": "", **delta}
            self.is_begun[index] = True
        if reason == "stop" and self._num_calls[index] and not _is_cut(update):
            reason = "tool_calls"
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": update.stop_reason,
        }
        if self.request.logprobs:
            choice["logprobs"] = {"content": partial(self._logprob_entries, update)}
        if self.request.return_token_ids:
            choice["token_ids"] = list(update.token_ids)
        return choice

    def _delta(self, choice: int, events: Sequence[BlockEvent]) -> dict[str, Any]:
        """Render events as the delta of a message."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            number = self._num_calls[choice]
            match event:
                case BlockStart(kind="tool_call", call_id=call_id, name=name):
                    function = {"name": name, "arguments": ""}
                    head = {"index": number, "id": call_id, "type": "function"}
                    calls[number] = {**head, "function": function}
                    self._num_calls[choice] += 1
                case BlockDelta(kind="tool_call", text=text):
                    continued = {"index": number - 1, "function": {"arguments": ""}}
                    call = calls.setdefault(number - 1, continued)
                    call["function"]["arguments"] += text
                case BlockDelta(kind="reasoning", text=text):
                    delta |= {"reasoning": text, "reasoning_content": text}
                case BlockDelta(kind="text", text=text):
                    delta["content"] = delta.get("content", "") + text
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    def _logprob_entries(self, update: Update) -> list[Entry]:
        pairs = zip(update.token_ids, update.logprobs or (), strict=bool(update.logprobs))
        return logprob_entries(self.service.tokenizer, pairs, self.request.top_logprobs or 0)


def _is_cut(update: Update) -> bool:
    """Return whether a stop string ended the output inside a tool call."""
    is_stop_string = isinstance(update.stop_reason, str)
    cut = (each for each in update.events[-1:] if isinstance(each, BlockStop))
    return is_stop_string and any(each.kind == "tool_call" and not each.is_complete for each in cut)


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    """Convert a streamed choice, whose delta is complete, to one with a message."""
    message = {"refusal": None, **choice.pop("delta")}
    for call in message.get("tool_calls", ()):
        del call["index"]
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    return {"index": choice.pop("index"), "message": message, **choice}
