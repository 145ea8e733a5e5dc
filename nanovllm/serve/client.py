"""A client for OpenAI-compatible servers, and a replacement for LLM that uses it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nanovllm.errors import ConfigError, EngineError, PromptTooLongError, RequestError
from nanovllm.outputs import RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import httpx

ALWAYS_SENT = ("max_tokens", "temperature", "top_p")


class OpenAIClient:
    """Client of the server at a URL such as http://127.0.0.1:8000, with or without /v1."""

    def __init__(
        self, url: str, api_key: str | None = None, max_connections: int | None = 64
    ) -> None:
        import httpx

        scheme = ""
        with contextlib.suppress(ValueError):  # raised for an invalid port or IPv6 address
            scheme = urlsplit(url).scheme if urlsplit(url).port != 0 else ""
        if scheme not in ("http", "https"):
            raise ConfigError(f"the URL must look like http://127.0.0.1:8000, got {url!r}")
        self.url = url
        self._root = url.rstrip("/").removesuffix("/v1")
        # No connection is kept alive, so that several event loops can use the client in turn.
        self._http = httpx.AsyncClient(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=0),
            trust_env=False,
            verify=ssl.create_default_context() if scheme == "https" else False,
        )

    async def get(self, path: str, timeout: float = 60.0) -> Any:
        """GET a path and return its JSON body; a path without a leading slash is under /v1."""
        async with self._response("GET", path, timeout=timeout) as response:
            body = await response.aread()
        try:
            return json.loads(body)
        except ValueError as error:
            raise EngineError(f"{self.url} returned invalid JSON for {path}") from error

    async def model(self) -> str:
        """Return the id of the server's first model."""
        listing = await self.get("models")
        try:
            return str(listing["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise EngineError(f"{self.url} does not list its models") from error

    async def stream(self, prompt: Any, **fields: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a completion; the prompt is text, token ids or a list of messages.

        Raise EngineError if the stream ends before the completion does.
        """
        import httpx

        is_chat = any(isinstance(each, dict) for each in prompt)
        path, name = ("chat/completions", "messages") if is_chat else ("completions", "prompt")
        body = {"stream_options": {"include_usage": True}, **fields, name: prompt}
        is_complete = False
        async with self._response("POST", path, body | {"stream": True}) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    # Read to the end: otherwise, httpx's iterators would close in tasks of their
                    # own, after the event loop.
                    with contextlib.suppress(httpx.HTTPError):
                        async for _ in lines:
                            pass
                    return
                event = _event(data)
                is_complete |= any(choice.get("finish_reason") for choice in event["choices"])
                yield event
        if not is_complete:
            raise EngineError(f"{self.url} ended the stream without a finish_reason")

    @contextlib.asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and yield its streaming response; raise unless the status is 200."""
        import httpx

        target = self._root + (path if path.startswith("/") else f"/v1/{path}")
        try:
            limits = httpx.Timeout(timeout, connect=60.0)
            request = self._http.stream(method, target, json=body, timeout=limits)
            async with request as response:
                if response.status_code != 200:
                    error = _error((await response.aread()).decode(errors="replace"))
                    is_long = error.get("code") == "context_length_exceeded"
                    kind = PromptTooLongError if is_long else RequestError
                    raise kind(f"the server returned {response.status_code}: {error['message']}")
                yield response
        except httpx.ConnectError as failure:
            raise EngineError(f"cannot connect to {self.url}: {failure}") from failure
        except httpx.HTTPError as failure:
            raise EngineError(
                f"{self.url} sent an invalid or incomplete response: {failure!r}"
            ) from failure


class HttpLLM:
    """A model on a server, with those methods of LLM that the command line uses.

    `stream` sends all prompts concurrently and yields the stream pieces as they arrive.
    """

    def __init__(self, client: OpenAIClient, model: str) -> None:
        self._client, self._model = client, model

    def apply_chat_template(self, messages: list[Any]) -> list[Any]:
        """Return the messages unchanged: the server applies the template."""
        return messages

    def stream(
        self,
        prompts: list[Any],
        params: SamplingParams,
        *,
        on_refusal: Callable[[int, RequestError], None] | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """Stream completions as `LLM.stream` does; a prompt is text or a list of messages."""
        queue: asyncio.Queue[StreamPiece | asyncio.Task[None]] = asyncio.Queue()
        loop = asyncio.new_event_loop()
        tasks = [
            loop.create_task(self._complete(index, prompt, params, queue))
            for index, prompt in enumerate(prompts)
        ]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        num_left = len(tasks)
        try:
            while num_left:
                item = loop.run_until_complete(queue.get())
                if isinstance(item, StreamPiece):
                    yield item
                    continue
                num_left -= 1
                error = item.exception()
                if isinstance(error, RequestError) and on_refusal is not None:
                    on_refusal(tasks.index(item), error)
                elif error is not None:
                    raise error
        finally:
            loop.run_until_complete(_cancel_tasks())
            loop.close()

    async def _complete(
        self, index: int, prompt: Any, params: SamplingParams, queue: asyncio.Queue[Any]
    ) -> None:
        start, first_token_time, text, reason = time.perf_counter(), 0.0, "", "stop"
        usage: dict[str, Any] = {}
        stream = self._client.stream(prompt, model=self._model, **_fields(params))
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    reason = choice.get("finish_reason") or reason
                    new = (choice.get("delta") or {}).get("content") or choice.get("text")
                    if new:
                        text += new
                        first_token_time = first_token_time or time.perf_counter() - start
                        queue.put_nowait(StreamPiece(index, new, [], None, index=index))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        # Servers report the number of tokens but not their ids, so these ids are placeholders.
        prompt_ids = [0] * (usage.get("prompt_tokens") or 0)
        ids = [0] * (usage.get("completion_tokens") or 0)
        times = first_token_time, time.perf_counter() - start
        output = RequestOutput(index, None, prompt_ids, text, ids, reason, cached, *times)
        queue.put_nowait(StreamPiece(index, "", [], output, index=index))


def _event(data: str) -> dict[str, Any]:
    """Parse a server-sent event that has a list of choices; an error event raises RequestError."""
    try:
        event = json.loads(data)
        has_failed = bool(event.get("error"))
        event["choices"] = [dict(choice) for choice in event.get("choices") or ()]
    except (ValueError, TypeError, AttributeError) as error:
        text = f"the server sent an event that is not in OpenAI's format: {data[:200]}"
        raise EngineError(text) from error
    if has_failed:
        raise RequestError(f"the server ended the stream with an error: {_error(data)['message']}")
    return dict(event)


def _error(text: str) -> dict[str, Any]:
    """Parse an error body in OpenAI's format; text in another format becomes the message."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(text)["error"]
        return {**error, "message": str(error["message"])}
    return {"message": text.strip() or "(empty body)"}


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _fields(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling fields to send: ALWAYS_SENT, and those that differ from the defaults."""
    default = SamplingParams()
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    schema = values.pop("structured_outputs")  # set by --json-schema
    sent = {
        name: value
        for name, value in values.items()
        if name in ALWAYS_SENT or value != getattr(default, name)
    }
    if schema is not None:
        named = {"name": "answer", "schema": schema["json"], "strict": True}
        sent["response_format"] = {"type": "json_schema", "json_schema": named}
    return sent
