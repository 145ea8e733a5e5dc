"""A model behind a URL, with the few methods of an LLM that commands use."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from nanovllm.cli.options import check_no_engine_options, engine_config
from nanovllm.cli.start import load_llm
from nanovllm.client import OpenAIClient
from nanovllm.errors import ConfigError, RequestError
from nanovllm.outputs import RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

ALWAYS_SENT = ("max_tokens", "temperature", "top_p")


@contextlib.contextmanager
def open_model(args: argparse.Namespace) -> Iterator[LLM | RemoteLLM]:
    """The model that a command asks: one behind a URL, or one that is loaded here."""
    if args.url is None:
        if args.api_key is not None:
            raise ConfigError("--api-key is for a server, and there is no --url; leave it out")
        with load_llm(engine_config(args), args.threads) as llm:
            yield llm
        return
    check_no_engine_options(args)
    client = OpenAIClient(args.url, args.api_key)
    yield RemoteLLM(client, args.model_tag or args.model or asyncio.run(client.model()))


def has_chat_template(llm: LLM | RemoteLLM) -> bool:
    """Whether the model can chat; a server is assumed to."""
    if isinstance(llm, RemoteLLM):
        return True
    tokenizer = llm.engine.front.tokenizer
    return tokenizer is not None and bool(tokenizer.chat_template)


class RemoteLLM:
    """Sends all prompts of a call at once, and yields what comes for any of them."""

    def __init__(self, client: OpenAIClient, model: str) -> None:
        self._client, self._model = client, model

    def apply_chat_template(self, messages: list[Any]) -> list[Any]:
        """Leave that to the server: a prompt is a conversation."""
        return messages

    def stream(
        self,
        prompts: list[Any],
        params: SamplingParams,
        *,
        on_refusal: Callable[[int, RequestError], None] | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """As `LLM.stream` does; a prompt is a text, or the messages of a chat."""
        queue: asyncio.Queue[StreamPiece | asyncio.Task[None]] = asyncio.Queue()
        loop = asyncio.new_event_loop()
        tasks = [
            loop.create_task(self._answer(index, prompt, params, queue))
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

    async def _answer(
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
        # Servers count tokens without naming them.
        prompt_ids = [0] * (usage.get("prompt_tokens") or 0)
        ids = [0] * (usage.get("completion_tokens") or 0)
        times = first_token_time, time.perf_counter() - start
        output = RequestOutput(index, None, prompt_ids, text, ids, reason, cached, *times)
        queue.put_nowait(StreamPiece(index, "", [], output, index=index))


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _fields(params: SamplingParams) -> dict[str, Any]:
    """The sampling fields of a request: those that are set, as servers differ in the rest."""
    default = SamplingParams()
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    schema = values.pop("structured_outputs")  # from --json-schema
    sent = {
        name: value
        for name, value in values.items()
        if name in ALWAYS_SENT or value != getattr(default, name)
    }
    if schema is not None:
        named = {"name": "answer", "schema": schema["json"], "strict": True}
        sent["response_format"] = {"type": "json_schema", "json_schema": named}
    return sent
