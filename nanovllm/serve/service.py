"""State shared by all routes: the model, its output formats, and admission control."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.engine.chat_template import ChatTemplate
from nanovllm.engine.images import ImageSource, PlacedImages, PromptImage
from nanovllm.errors import PromptTooLongError, RequestError, at_index, errors_about
from nanovllm.serve.fields import log_ignored_once
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.model_interface import Model
from nanovllm.serve.parsing.formats import choose_formats
from nanovllm.serve.replay import EncodedPrompt, ReadReply, ReplayCache
from nanovllm.serve.server_options import ServerOptions
from nanovllm.validation import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
MAX_PROMPTS = 2048  # maximum number of prompts per request
# Clients search errors for "maximum context length" (OpenAI) and "prompt is too long" (Anthropic).
TOO_LONG = "the prompt is too long: this model's maximum context length is {} tokens"


class Service:
    def __init__(self, llm: Model, options: ServerOptions) -> None:
        self.llm, self.options = llm, options
        log_ignored_once()
        self.created = int(time.time())
        self.metrics = Metrics(llm, options.metrics_prefix, self.model_name)
        self.chat_template = options.chat_template or self.tokenizer.chat_template
        self.compile_template = functools.cache(ChatTemplate)
        template = self.chat_template or ""
        texts = template if isinstance(template, str) else "".join(template.values())
        self.template_text = texts
        self.formats = choose_formats(texts, options.tool_call_parser, options.reasoning_parser)
        encode = functools.partial(llm.input_processor.encode, add_special_tokens=False)
        self.replays = ReplayCache(encode)
        # A pool of their own, so that large images do not delay other requests' tokenization.
        self._reading = ThreadPoolExecutor(2, "nanovllm-images")
        tokens = self.tokenizer.added_tokens_decoder
        self.added_tokens = {i: each.content for i, each in tokens.items()}
        self.special_ids = {each.content: i for i, each in tokens.items() if each.special}
        ids, reasoning = {each.content: i for i, each in tokens.items()}, self.formats.reasoning
        # Token id of the reasoning end marker; None without such a marker, or if it is not a single
        # token.
        self.reasoning_end_id = None if reasoning is None else ids.get(reasoning.end)
        markup = self.formats.markup()
        self.hidden_tokens = {i: text for text, i in self.special_ids.items() if text not in markup}
        self.has_special_markers = len(self.hidden_tokens) < len(self.special_ids)
        self.num_sequences = 0  # number of sequences in progress: samples of all prompts
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))  # in characters

    @property
    def model_name(self) -> str:
        return self.options.served_model_name[0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self.llm.input_processor.tokenizer
        assert tokenizer is not None
        return tokenizer

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.served_model_name:
            names = ", ".join(self.options.served_model_name)
            message = f"the model {name!r} does not exist; this server has {names}"
            raise RequestError(message, param="model", code="model_not_found", status=404)

    def check_queue(self) -> None:
        """Reject a request with status 429 if too many requests are already waiting."""
        most = self.options.max_queued_requests
        num_sequences = max(self.num_sequences, self.llm.num_requests)
        num_waiting = sum(replica.stats.num_waiting for replica in self.llm.replicas)
        if num_waiting >= most or num_sequences >= self._max_sequences:
            message = "too many requests are waiting or running; try again later"
            raise RequestError(message, code="queue_full", status=429)

    def check_num_sequences(self, num_prompts: int, n: int = 1) -> None:
        """Reject a request with more sequences than the server can run and queue."""
        most = self._max_sequences
        if num_prompts * n > most:
            raise RequestError(
                f"{num_prompts} prompts with n={n} are {num_prompts * n} sequences, but this "
                f"server runs and queues at most {most}; split the request",
                param="n" if n > 1 else None,
            )

    @contextlib.contextmanager
    def counted(self, num_sequences: int) -> Iterator[None]:
        """Count sequences as in progress inside the `with` block."""
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences

    @property
    def _max_sequences(self) -> int:
        """Maximum number of sequences that may be running or waiting."""
        max_running = self.llm.config.max_num_seqs * len(self.llm.replicas)
        return max_running + self.options.max_queued_requests

    async def token_ids(
        self, prompt: str | list[int], param: str = "prompt", **options: Any
    ) -> list[int]:
        """Return a prompt's token ids; text is tokenized in a thread, off the event loop."""
        token_ids_of = self.llm.input_processor.token_ids_of
        with errors_about(param):
            if isinstance(prompt, list):
                return token_ids_of(prompt).tolist()
            self._check_num_characters(prompt)
            return (await asyncio.to_thread(token_ids_of, prompt, **options)).tolist()

    async def encode_chat(
        self, text: str, salt: str | None, read: ReadReply, param: str
    ) -> EncodedPrompt:
        """Tokenize a rendered conversation, with the kept token ids of the replies in it."""
        with errors_about(param):
            self._check_num_characters(text)
            encoded = await asyncio.to_thread(self.replays.encode, text, salt, read)
            self.llm.input_processor.token_ids_of(encoded.token_ids)  # validates them
        return encoded

    async def read_images(
        self, sources: Sequence[ImageSource | RequestError]
    ) -> list[PromptImage | RequestError]:
        """Read images in a thread; an error stays in its place."""
        good = [each for each in sources if not isinstance(each, RequestError)]
        read = iter(await self._with_images(self.llm.input_processor.image_reader.read_all, good))
        return [each if isinstance(each, RequestError) else next(read) for each in sources]

    async def place_images(
        self, token_ids: list[int], images: list[PromptImage], param: str
    ) -> PlacedImages:
        """Expand the placeholders of images."""
        with errors_about(param):
            place = self.llm.input_processor.image_reader.place
            return await self._with_images(place, token_ids, images)

    async def _with_images(self, function: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reading, function, *arguments)
        except PromptTooLongError as error:
            raise PromptTooLongError(f"{TOO_LONG.format(self.llm.max_len)}; {error}") from error

    def _check_num_characters(self, prompt: str) -> None:
        """Reject a prompt that is far too long, without tokenizing it."""
        max_len = self.llm.max_len
        if len(prompt) > max_len * self._longest_token:
            raise PromptTooLongError(
                f"{TOO_LONG.format(max_len)}, which cannot hold the prompt's {len(prompt)} "
                "characters"
            )

    async def all_token_ids(self, prompts: Any, param: str, **options: Any) -> Sequence[list[int]]:
        """Return the token ids of one or several prompts, each a string or a list of token ids."""
        items = prompts if isinstance(prompts, list) else [prompts]
        if items and isinstance(items[0], int):
            items = [items]
        is_valid = 1 <= len(items) <= MAX_PROMPTS
        require(is_valid, param, f"1 to {MAX_PROMPTS} prompts", f"{len(items)} prompts")
        token_ids = []
        for index, item in enumerate(items):
            try:
                token_ids.append(await self.token_ids(item, param, **options))
            except RequestError as error:
                raise at_index(error, param, index, len(items)) from error
        return token_ids

    def check_length(self, num_prompt: int, num_completion: int, param: str) -> None:
        """Raise PromptTooLongError if a prompt and its completion exceed the context length."""
        max_len = self.llm.max_len
        if num_prompt + num_completion > max_len:
            raise PromptTooLongError(
                f"{TOO_LONG.format(max_len)}, but the prompt has {num_prompt} tokens and "
                f"{num_completion} more are requested; shorten the prompt or request fewer tokens",
                param=param,
            )

    def max_tokens(
        self, num_prompt: int, requested: int | None, default: int | None, param: str
    ) -> int:
        """Return the maximum number of output tokens; raise if the request exceeds the context."""
        self.check_length(num_prompt, 1 if requested is None else requested, param)
        room = self.llm.max_len - num_prompt
        if requested is not None:
            return requested
        return room if default is None else min(default, room)
