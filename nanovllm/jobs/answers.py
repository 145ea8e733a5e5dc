"""Answers to rows, by the code that answers HTTP requests; they depend on nothing but the row."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Set
from typing import Any

from nanovllm.errors import ConfigError, EngineError, NanovllmError, RequestError
from nanovllm.jobs.ledger import ROW_ID
from nanovllm.jobs.rows import Row
from nanovllm.server.answer import Event, EventStream, whole_body
from nanovllm.server.chat_completions import OF_PROMPT, answer_chat
from nanovllm.server.completions import answer_completion
from nanovllm.server.embeddings import embed
from nanovllm.server.errors import openai_body
from nanovllm.server.records import (
    ApiRecord,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    as_record,
)
from nanovllm.server.responses import ResponsesRequest, answer_response
from nanovllm.server.service import Service

ROUTES: dict[
    str, tuple[type[ApiRecord], Callable[[Service, Any], Awaitable[EventStream | Event]]]
] = {
    "/v1/chat/completions": (ChatRequest, answer_chat),
    "/v1/completions": (CompletionRequest, answer_completion),
    "/v1/embeddings": (EmbeddingRequest, embed),
    "/v1/responses": (ResponsesRequest, answer_response),
}
TEXT_FIELDS = ("add_special_tokens", "best_of", "echo")  # no fields of a chat
BATCH_FIELDS = {"custom_id", "method", "url", "body"}
ASKED_FOR = ("logprobs", "token_ids", *OF_PROMPT)
ANSWERED = ("text", "reasoning", "tool_calls", *ASKED_FOR, "finish_reason")  # of a plain row
RUN_DEPENDENT = ("prompt_tokens_details", "input_tokens_details")  # what the cache held


class RowError(Exception):
    """Why a row has no answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # both, so that another process can send it
        self.code, self.message = code, message


class Answers:
    def __init__(self, service: Service, seed: int, max_tokens: int | None, is_raw: bool) -> None:
        self._service, self._seed, self._max_tokens = service, seed, max_tokens
        self._is_raw = is_raw or not service.chat_template

    async def __call__(self, row: Row) -> dict[str, Any]:
        """Return the line of a row; raises RowError for a bad one."""
        if row.error is not None:
            raise RowError("invalid_row", row.error)
        error: NanovllmError | None = None
        for _ in self._service.llm.replicas:  # where one is lost, another one answers
            try:
                return await (self._batch_line(row) if row.is_batch else self._plain_line(row))
            except EngineError as failure:
                if self._service.llm.error is not None:
                    raise
                error = failure
            except (RequestError, ConfigError) as refusal:
                error = refusal
                break
        assert error is not None
        told = openai_body(error)["error"]
        raise RowError(told["code"] or told["type"], told["message"]) from error

    async def _batch_line(self, row: Row) -> dict[str, Any]:
        url, body = row.fields.get("url"), row.fields["body"]
        if unknown := row.fields.keys() - BATCH_FIELDS:
            raise RowError("invalid_row", f"{min(unknown)!r} is no field of a batch")
        if not isinstance(row.custom_id, str):
            raise RowError("invalid_row", "custom_id must be a string")
        if row.fields.get("method", "POST") != "POST" or url not in tuple(ROUTES):
            raise RowError("invalid_url", f"url must be one of {', '.join(ROUTES)}, to POST to")
        if not isinstance(body, dict):
            raise RowError("invalid_row", "body must be an object")
        if body.get("stream"):
            raise RowError("invalid_row", "a row of a batch is not streamed")
        body = await self._body(row.index, url, body)
        request_id = f"req_{row.index}"
        response = {"status_code": 200, "request_id": request_id, "body": body}
        row_id = ROW_ID.format(row.index)
        return {"id": row_id, "custom_id": row.custom_id, "response": response, "error": None}

    async def _plain_line(self, row: Row) -> dict[str, Any]:
        fields, prompt = row.fields, row.fields.get("prompt")
        is_chat = fields.get("messages") is not None
        if is_chat == (prompt is not None):
            raise RowError("invalid_row", "a row has a prompt, or messages, or a batch's body")
        if isinstance(prompt, str) and not self._is_raw:
            is_chat = True
            fields = {**fields, "messages": [{"role": "user", "content": prompt}]}
            if unfit := [name for name in TEXT_FIELDS if fields.get(name) is not None]:
                raise RowError("invalid_row", f"{unfit[0]} needs --raw: the prompt is a chat")
        url = "/v1/chat/completions" if is_chat else "/v1/completions"
        names = ROUTES[url][0].model_fields.keys() - {"model", "stream", "stream_options"}
        body = {name: value for name, value in fields.items() if name in names}
        body.pop("prompt" if is_chat else "messages", None)
        prompt = body.get("prompt", "")
        types = {*map(type, prompt)} if isinstance(prompt, list) else set()  # of thousands of ids
        if not all(issubclass(each, int) for each in types):
            raise RowError("invalid_row", "the prompt of a row is one text, or one list of ids")
        body = await self._body(row.index, url, body)
        of_prompt = {name: body[name] for name in OF_PROMPT if name in body}
        answers = [_plain_answer(choice | of_prompt) for choice in body["choices"]]
        found = {name for each in answers for name in each}
        joined = {name: [each.get(name) for each in answers] for name in ANSWERED if name in found}
        answer = answers[0] if len(answers) == 1 else joined
        result = {"index": row.index, **answer, "usage": body["usage"]}
        taken = result.keys() | row.fields.keys()
        kept = {_free_name(k, taken) if k in result else k: v for k, v in row.fields.items()}
        return {**kept, **result}

    async def _body(self, index: int, url: str, body: dict[str, Any]) -> dict[str, Any]:
        kind, answer = ROUTES[url]
        defaults = {"seed": row_seed(self._seed, index), "max_output_tokens": self._max_tokens}
        body = {name: value for name, value in body.items() if value is not None}
        if "max_completion_tokens" not in body:
            defaults["max_tokens"] = self._max_tokens
        defaults = {name: each for name, each in defaults.items() if name in kind.model_fields}
        made = await answer(self._service, as_record(kind, {**defaults, **body}))
        whole = made if isinstance(made, dict) else await whole_body(made)
        settled: dict[str, Any] = _Settled(index).value(whole)
        return settled


def row_seed(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _plain_answer(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message", choice)
    answer = {"text": message.get("content", message.get("text")) or ""}
    for name in ("reasoning", "tool_calls"):
        if message.get(name):
            answer[name] = message[name]
    for name in ASKED_FOR:
        if choice.get(name) is not None:
            answer[name] = choice[name]
    return {**answer, "finish_reason": choice["finish_reason"]}


def _free_name(name: str, taken: Set[str]) -> str:
    while name in taken:
        name = f"input_{name}"
    return name


class _Settled:
    """Writes a body without what differs from run to run: its ids, times, and the cache's hits."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._ids: dict[str, str] = {}  # by those that they replace

    def value(self, value: Any, name: str = "") -> Any:
        if callable(value):
            value = value()
        if isinstance(value, dict):
            return {k: self.value(v, k) for k, v in value.items() if k not in RUN_DEPENDENT}
        if isinstance(value, list):
            return [self.value(each) for each in value] if name != "embedding" else value
        if name in ("id", "call_id", "item_id") and isinstance(value, str):
            return self._ids.setdefault(value, self._id(value))
        return 0 if name in ("created", "created_at", "completed_at") and value else value

    def _id(self, value: str) -> str:
        """One of the same form."""
        prefix, rest = re.fullmatch(r"([a-z]+[-_])?(.*)", value, re.DOTALL).groups("")  # type: ignore[union-attr]
        text = f"{self._index}:{len(self._ids)}"
        return prefix + hashlib.sha256(text.encode()).hexdigest()[: len(rest)]
