"""Completes rows with the HTTP API's handlers; seeds, ids and times are the same in every run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Set
from dataclasses import asdict, dataclass
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.batch.progress_file import ROW_ID
from nanovllm.batch.rows import Row
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError, NanovllmError, RequestError
from nanovllm.serve.app import ROUTES
from nanovllm.serve.http_errors import openai_body
from nanovllm.serve.http_responses import whole_body
from nanovllm.serve.openai.chat_completions import OF_PROMPT
from nanovllm.serve.protocol import as_api_model
from nanovllm.serve.server_options import ServerOptions, resolve
from nanovllm.serve.service import Service

COMPLETION_FIELDS = ("add_special_tokens", "best_of", "echo")  # not supported by chat completions
BATCH_FIELDS = {"custom_id", "method", "url", "body"}
OUTPUT_NAMES = {"reasoning", "thinking"}  # in plain rows, these are the outputs of other jobs
NOT_OF_ROWS = {"model", "stream", "stream_options", *OUTPUT_NAMES}
REQUESTED = ("logprobs", "token_ids", *OF_PROMPT)
PLAIN_FIELDS = ("text", "reasoning", "tool_calls", *REQUESTED, "finish_reason")
# Parts of a response that differ from run to run.
CACHE_HITS = ("prompt_tokens_details", "input_tokens_details")
TIMES = ("created", "created_at", "completed_at")
IDS = ("id", "call_id", "item_id")


class RowError(Exception):
    """The reason why a row has no response."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # both arguments, so that it can be pickled
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Everything that an engine needs to start, possibly on another machine."""

    config: EngineConfig
    server: ServerOptions
    max_tokens: int | None = None  # default for rows that do not set it
    is_raw: bool = False  # continue the text of a "prompt" without the chat template

    @property
    def max_concurrency(self) -> int:
        """Maximum number of rows in progress on all replicas: half of them run, the others wait."""
        return 2 * self.config.max_num_seqs * self.config.data_parallel_size


class RowEngine:
    """Completes rows. RowError means an invalid row; any other error means a failed engine."""

    def __init__(self, options: RowOptions, llm: AsyncLLM | None = None) -> None:
        self.llm = llm or AsyncLLM(**asdict(options.config))
        server = options.server
        if server.generation_config == "auto":  # the model's defaults are known only now
            server = resolve(server, options.config.model, self.llm.generation_config)
        self._options, self._service = options, Service(self.llm, server)
        self._is_raw = options.is_raw or not self._service.chat_template

    def close(self) -> None:
        self.llm.close()

    async def __call__(self, row: Row) -> dict[str, Any]:
        """Return the output line of a row; raise RowError if the row is invalid."""
        if row.error is not None:
            raise RowError("invalid_row", row.error)
        error: NanovllmError | None = None
        for _ in self.llm.replicas:  # if a replica is lost, try another one
            try:
                return await (self._batch_line(row) if row.is_batch else self._plain_line(row))
            except EngineError as failure:
                if self.llm.error is not None:
                    raise
                error = failure
            except (RequestError, ConfigError) as rejection:
                error = rejection
                break
        assert error is not None
        body = openai_body(error)["error"]
        raise RowError(body["code"] or body["type"], body["message"]) from error

    async def _batch_line(self, row: Row) -> dict[str, Any]:
        url, body = row.fields.get("url"), row.fields["body"]
        if unknown := row.fields.keys() - BATCH_FIELDS:
            raise RowError("invalid_row", f"{min(unknown)!r} is not a field of the batch format")
        if not isinstance(row.custom_id, str) or not isinstance(body, dict):
            raise RowError("invalid_row", "custom_id must be a string and body a JSON object")
        if row.fields.get("method", "POST") != "POST" or url not in tuple(ROUTES):
            raise RowError(
                "invalid_url", f"method must be POST, and url one of {', '.join(ROUTES)}"
            )
        if body.get("stream"):
            raise RowError("invalid_row", "stream is not supported in a batch; omit it")
        body = await self._respond(row.index, url, body)
        response = {"status_code": 200, "request_id": f"req_{row.index}", "body": body}
        row_id = f"{ROW_ID}{row.index}"
        return {"id": row_id, "custom_id": row.custom_id, "response": response, "error": None}

    async def _plain_line(self, row: Row) -> dict[str, Any]:
        fields, prompt = row.fields, row.fields.get("prompt")
        is_chat = fields.get("messages") is not None
        if is_chat == (prompt is not None):
            raise RowError("invalid_row", "a row needs prompt or messages, or custom_id and body")
        if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt):
            raise RowError("invalid_row", "prompt must be a single string or list of token ids")
        if isinstance(prompt, str) and not self._is_raw:
            is_chat = True
            fields = {**fields, "messages": [{"role": "user", "content": prompt}]}
            if unfit := [name for name in COMPLETION_FIELDS if fields.get(name) is not None]:
                raise RowError("invalid_row", f"{unfit[0]} needs --raw: prompts are sent as chats")
        url = "/v1/chat/completions" if is_chat else "/v1/completions"
        other = "prompt" if is_chat else "messages"
        names = ROUTES[url][0].model_fields.keys() - {*NOT_OF_ROWS, other}
        body = {name: value for name, value in fields.items() if name in names}
        body = await self._respond(row.index, url, body)
        of_prompt = {name: body[name] for name in OF_PROMPT if name in body}
        outputs = [_plain_output(choice | of_prompt) for choice in body["choices"]]
        output = outputs[0]
        if len(outputs) > 1:
            columns = [name for name in PLAIN_FIELDS if any(name in each for each in outputs)]
            output = {name: [each.get(name) for each in outputs] for name in columns}
        result = {"index": row.index, **output, "usage": body["usage"]}
        taken = result.keys() | row.fields.keys()
        inputs = {_free_name(k, taken) if k in result else k: v for k, v in row.fields.items()}
        return {**inputs, **result}

    async def _respond(self, index: int, url: str, body: dict[str, Any]) -> dict[str, Any]:
        kind, create = ROUTES[url]
        seed, max_tokens = row_seed(self._options.config.seed, index), self._options.max_tokens
        defaults = {"seed": seed, "max_output_tokens": max_tokens}
        body = {name: value for name, value in body.items() if value is not None}
        if "max_completion_tokens" not in body:
            defaults["max_tokens"] = max_tokens
        defaults = {name: each for name, each in defaults.items() if name in kind.model_fields}
        stream = await create(self._service, as_api_model(kind, {**defaults, **body}))
        response: dict[str, Any] = _reproducible(await whole_body(stream), index, {})
        return response


def row_seed(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _plain_output(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message", choice)
    output = {"text": message.get("content", message.get("text")) or ""}
    output |= {name: message[name] for name in ("reasoning", "tool_calls") if message.get(name)}
    output |= {name: choice[name] for name in REQUESTED if choice.get(name) is not None}
    return {**output, "finish_reason": choice["finish_reason"]}


def _free_name(name: str, taken: Set[str]) -> str:
    while name in taken:
        name = f"input_{name}"
    return name


def _reproducible(value: Any, index: int, ids: dict[str, str], name: str = "") -> Any:
    """Replace ids and times in a response, and omit cache hits: all of them differ between runs."""
    if callable(value):
        value = value()
    if isinstance(value, dict):
        stable = {key: each for key, each in value.items() if key not in CACHE_HITS}
        return {key: _reproducible(each, index, ids, key) for key, each in stable.items()}
    if isinstance(value, list) and name != "embedding":
        return [_reproducible(each, index, ids) for each in value]
    if name in IDS and isinstance(value, str):
        prefix = re.sub("[^-_]*$", "", value)
        return ids.setdefault(value, f"{prefix}{index}_{len(ids)}")
    return 0 if name in TIMES and value else value
