"""A model behind a URL, with the few methods of an LLM that commands use."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from nanovllm.cli.options import check_no_engine_options, engine_config
from nanovllm.cli.start import load_llm
from nanovllm.client import OpenAIClient
from nanovllm.errors import ConfigError, RequestError
from nanovllm.outputs import RequestOutput, StepOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

OPENAI_NAMES = ("max_tokens", "temperature", "top_p")  # sent always; others if they are set


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
    """Whether it can be talked to; of a server only an answer would tell."""
    if isinstance(llm, RemoteLLM):
        return True
    tokenizer = llm.engine.tokenizer
    return tokenizer is not None and bool(tokenizer.chat_template)


class RemoteLLM:
    """Asks all prompts of a call at once, and yields what comes for any of them."""

    def __init__(self, client: OpenAIClient, model: str) -> None:
        self._client, self._model = client, model

    def apply_chat_template(self, messages: list[Any]) -> list[Any]:
        """Leave that to the server: a prompt is a conversation."""
        return [messages] if isinstance(messages[0], dict) else messages

    def stream(
        self,
        prompts: Any,
        params: SamplingParams,
        *,
        on_step: Callable[[StepOutput], None] | None = None,
        on_refusal: Callable[[int, RequestError], None] | None = None,
    ) -> Iterator[StreamPiece]:
        """As `LLM.stream` does; a prompt is a text, or the messages of a chat."""
        is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], dict))
        asked = [prompts] if is_one else list(prompts)
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            news = self._all(asked, params)
            try:
                while True:
                    try:
                        index, piece = loop.run_until_complete(anext(news))
                    except StopAsyncIteration:
                        return
                    if isinstance(piece, StreamPiece):
                        if on_step is not None:
                            on_step(_as_step(piece))
                        yield piece
                    elif on_refusal is None:
                        raise piece
                    else:
                        on_refusal(index, piece)
            finally:
                loop.run_until_complete(news.aclose())

    async def _all(
        self, prompts: list[Any], params: SamplingParams
    ) -> AsyncGenerator[tuple[int, StreamPiece | RequestError], None]:
        queue: asyncio.Queue[tuple[int, StreamPiece | Exception | None]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._ask(index, prompt, params, queue))
            for index, prompt in enumerate(prompts)
        ]
        num_left = len(tasks)
        try:
            while num_left:
                index, news = await queue.get()
                if news is None:
                    num_left -= 1
                elif isinstance(news, StreamPiece | RequestError):
                    yield index, news
                else:
                    raise news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(
        self,
        index: int,
        prompt: Any,
        params: SamplingParams,
        queue: asyncio.Queue[tuple[int, StreamPiece | Exception | None]],
    ) -> None:
        try:
            async with contextlib.aclosing(self._answer(index, prompt, params)) as pieces:
                async for piece in pieces:
                    queue.put_nowait((index, piece))
        except Exception as error:  # whatever it is, the reader raises it
            queue.put_nowait((index, error))
        queue.put_nowait((index, None))

    async def _answer(
        self, index: int, prompt: Any, params: SamplingParams
    ) -> AsyncGenerator[StreamPiece, None]:
        is_chat = not isinstance(prompt, str)
        path = "chat/completions" if is_chat else "completions"
        body = _fields(params) | {"model": self._model, "stream_options": {"include_usage": True}}
        body |= {"messages" if is_chat else "prompt": prompt}
        begin, first, text, reason = time.perf_counter(), 0.0, "", "stop"
        usage: dict[str, Any] = {}
        async with contextlib.aclosing(self._client.stream(path, body)) as events:
            async for event in events:
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    said = (choice.get("delta") or {}) if is_chat else choice
                    new = said.get("content" if is_chat else "text") or ""
                    reason = choice.get("finish_reason") or reason
                    first = first or (time.perf_counter() if new else 0.0)
                    text += new
                    if new:
                        yield StreamPiece(index, new, [], None, index=index)
        now = time.perf_counter()
        times = (first - begin if first else 0.0, now - begin)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        # Servers count tokens without naming them.
        ids, prompt_ids = (
            [0] * (usage.get(f"{kind}_tokens") or 0) for kind in ("completion", "prompt")
        )
        output = RequestOutput(
            index, prompt if not is_chat else None, prompt_ids, text, ids, reason, cached, *times
        )
        yield StreamPiece(index, "", [], output, index=index)


def _as_step(piece: StreamPiece) -> StepOutput:
    """One token for each piece: how many a server sends at once it does not say."""
    finished = [] if piece.output is None else [piece.output]
    return StepOutput(finished, [piece], 0, int(piece.output is None))


def _fields(params: SamplingParams) -> dict[str, Any]:
    """What a request says of sampling: as little as can be, as servers differ in the rest."""
    default, schema = SamplingParams(), params.structured_outputs
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    del values["structured_outputs"]
    asked = {
        name: value
        for name, value in values.items()
        if name in OPENAI_NAMES or value != getattr(default, name)
    }
    if schema is not None:  # of --json-schema
        named = {"name": "answer", "schema": schema["json"], "strict": True}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    return asked
