"""LLM: offline generation and chat over an engine."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.conversations import prompts_of, template_options
from nanovllm.engine.front import Live
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.step import Pooling
from nanovllm.engine_options import EngineOptions, engine_config
from nanovllm.errors import RequestError
from nanovllm.outputs import EmbeddingOutput, RequestOutput, Score, StepOutput, StreamPiece
from nanovllm.progress import Progress
from nanovllm.prompts import (
    Messages,
    Params,
    Prompts,
    as_params,
    as_prompt,
    at_index,
    split_prompts,
)
from nanovllm.sampling_params import SamplingParams
from nanovllm.scoring import SCORED, check_pooling, continue_prompt, embedding_of, score_of
from nanovllm.serving.engine_thread import EngineThread, Job
from nanovllm.serving.growing_job import answers_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack


class LLM:
    """A language model, ready to generate.

    >>> with LLM("smollm2") as llm:
    ...     print(llm.generate("The capital of France is")[0].text)

    Several threads may use it at once: their requests run as one batch, and each caller gets its
    own answers.

    Keyword arguments are the fields of `nanovllm.config.EngineConfig`. Options of vLLM that have
    no effect here are accepted with a warning; others raise TypeError.
    """

    def __init__(self, model: str | Path, **options: Unpack[EngineOptions]) -> None:
        with torch.device("cpu"):  # a default that the caller set for other work is not for ours
            self.engine = LLMEngine(engine_config(model, options))
        self._thread = EngineThread(self.engine)
        weakref.finalize(self, self._thread.close)  # when it is dropped, or the interpreter exits
        self._thread.start()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt, batched continuously; results come in the order of the prompts."""
        return self._run(self._prepare(prompts, sampling_params, cache_salt, False), use_tqdm)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        cache_salt: str | None = None,
        on_step: Callable[[StepOutput], None] | None = None,
        on_refusal: Callable[[int, RequestError], None] | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """Like `generate`, but yield text as it comes; closing the iterator aborts the rest.

        `on_step` sees every engine step before its pieces are yielded. With `on_refusal` a prompt
        that cannot run is reported by its index, and the others are answered; without, it raises.
        """
        job = self._prepare(prompts, sampling_params, cache_salt, True, on_refusal)
        with contextlib.closing(self._thread.stream(job)) as steps:
            for step in steps:
                if on_step is not None:
                    on_step(step)
                yield from step.pieces

    def generate_stream(
        self,
        prompts: Iterable[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Answer any number of prompts: yield the index and the output of each as it finishes.

        Prompts, and their parameters if each has its own, are read when there is room for more.
        """
        self._check_usable()
        return answers_of(self._thread, prompts, sampling_params, cache_salt)

    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, formatted by the model's chat template.

        `tools` are schemas, or functions with docstrings. `continue_final_message` has the model
        go on from where the last message ends; otherwise a new message begins, unless
        `add_generation_prompt` is False.
        """
        options = template_options(
            chat_template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        prompts = self.apply_chat_template(messages, **options)
        return self.generate(prompts, sampling_params, use_tqdm, cache_salt=cache_salt)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        *,
        cache_salt: str | None = None,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """Like `chat`, but yield text as it comes, as `stream` does."""
        options = template_options(
            chat_template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        prompts = self.apply_chat_template(messages, **options)
        return self.stream(prompts, sampling_params, cache_salt=cache_salt)

    def embed(
        self,
        prompts: Prompts,
        pooling: Pooling = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Return a vector for each prompt: a list of floats, in float32's precision.

        It is the hidden state of the last token, or the mean over all tokens, after the model's
        final norm. `normalize` divides it by its length.
        """
        check_pooling(pooling)
        params = SamplingParams(max_tokens=1)
        job = self._prepare(prompts, params, cache_salt, False, pooling=pooling)
        return [embedding_of(output, normalize) for output in self._run(job, use_tqdm)]

    def score(
        self,
        prompt: Prompts,
        continuations: Sequence[Any],
        *,
        cache_salt: str | None = None,
    ) -> list[Score]:
        """Return how likely each continuation of a prompt is: a text, or token ids.

        A text is tokenised together with the prompt, as the model would read both.
        """
        first = as_prompt(prompt, cache_salt)
        continued = continue_prompt(first.content, continuations, self.engine.front.token_ids_of)
        wholes = [each.token_ids for each in continued]
        outputs = self.generate(wholes, SCORED, use_tqdm=False, cache_salt=first.cache_salt)
        return [score_of(output, one.start) for output, one in zip(outputs, continued, strict=True)]

    def apply_chat_template(self, messages: Messages, **options: Any) -> list[list[int]]:
        """Return one prompt of token ids per conversation."""
        return prompts_of(self.engine.front, messages, **options)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer; with `skip_tokenizer_init` there is none, which raises."""
        return self.engine.front.get_tokenizer()

    def add_request(
        self,
        prompt: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> int:
        """Queue one prompt for `step`; returns its seq_id."""
        self._thread.check_process()
        params = SamplingParams() if sampling_params is None else sampling_params
        one = as_prompt(prompt, cache_salt)
        live = self.engine.prepare(
            one.content,
            params,
            cache_salt=one.cache_salt,
            is_streaming=True,
            request_id=request_id,
        )
        self._thread.add(live)
        return live.seq_id

    def step(self) -> StepOutput:
        """Run one engine step, and return what is new of the prompts of `add_request`.

        `pieces` has the new tokens and text of every request that runs, `finished` the outputs of
        those that ended.
        """
        self._check_usable()
        return self._thread.step()

    def is_finished(self) -> bool:
        self._check_usable()
        return self._thread.call(self._thread.is_finished)

    def abort(self, seq_id: int | str) -> RequestOutput | None:
        """End a request now, by its seq_id or its request_id.

        Returns what it had, or None when it is not running.
        """
        self._check_usable()
        return self._thread.call(lambda: self._thread.abort(seq_id))

    def abort_all(self) -> list[RequestOutput]:
        """End every request of every caller now; returns what each had."""
        self._check_usable()
        return self._thread.call(self._thread.abort_all)

    def close(self) -> None:
        """Free the model and its cache, after the step that runs; once is enough."""
        self._thread.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepare(
        self,
        prompts: Prompts,
        params: Params,
        cache_salt: str | None,
        is_streaming: bool,
        on_refusal: Callable[[int, RequestError], None] | None = None,
        pooling: Pooling | None = None,
    ) -> Job:
        """Check and tokenise the prompts of one call; nothing is queued yet."""
        self._check_usable()
        items = split_prompts(prompts)
        requests: dict[int, Live] = {}
        pairs = zip(items, as_params(params, len(items)), strict=True)
        for index, (item, param) in enumerate(pairs):
            try:
                prompt = as_prompt(item, cache_salt)
                requests[index] = self.engine.prepare(
                    prompt.content,
                    param,
                    cache_salt=prompt.cache_salt,
                    is_streaming=is_streaming,
                    pooling=pooling,
                )
            except RequestError as error:
                if on_refusal is None:
                    raise at_index(error, "prompts", index, len(items)) from error
                on_refusal(index, error)
        return Job(requests, is_streaming)

    def _run(self, job: Job, use_tqdm: bool) -> list[RequestOutput]:
        progress = Progress(job, is_shown=use_tqdm)
        try:
            self._thread.run(job, progress.update)
        finally:
            progress.close()
        return [job.outputs[index] for index in range(len(job.outputs))]

    def _check_usable(self) -> None:
        self._thread.check_caller()
        self.engine.raise_if_closed()
