"""LLM: offline generation and chat over an engine."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from tqdm import tqdm

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine, check_text
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput, StepOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams

Prompts = str | list[str] | list[int] | list[list[int]]
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = list[dict[str, Any]] | list[list[dict[str, Any]]]


class LLM:
    """A language model, ready to generate.

    >>> with LLM("smollm2") as llm:
    ...     print(llm.generate("The capital of France is")[0].text)

    Keyword arguments are the fields of `nanovllm.config.EngineConfig`; others raise TypeError.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.engine = LLMEngine(EngineConfig(str(model), **options))
        self._jobs: dict[int, _Job] = {}  # seq_id -> the generate or stream call that waits for it
        self._unclaimed: list[RequestOutput] = []  # from add_request, for the next step()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt, batched continuously; results come in the order of the prompts."""
        job = self._submit(prompts, sampling_params, cache_salt, is_streaming=False)
        progress = Progress(len(job.indexes), is_shown=use_tqdm)
        try:
            while job.indexes:
                progress.update(self._step(), len(job.outputs))
        finally:
            self._abort(job)
            progress.close()
        return sorted(job.outputs, key=lambda output: output.seq_id)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        cache_salt: str | None = None,
        on_step: Callable[[StepOutput], None] | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """Like `generate`, but yield text as it comes; closing the iterator aborts the rest.

        `on_step` sees every engine step before its pieces are yielded.
        """
        job = self._submit(prompts, sampling_params, cache_salt, is_streaming=True)
        try:
            while job.indexes or job.pieces:
                if not job.pieces:
                    step = self._step()
                    if on_step is not None:
                        on_step(step)
                while job.pieces:
                    yield job.pieces.popleft()
        finally:
            self._abort(job)

    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, formatted by the model's chat template."""
        prompts = self.apply_chat_template(messages, **(chat_template_kwargs or {}))
        return self.generate(prompts, sampling_params, use_tqdm, cache_salt=cache_salt)

    def apply_chat_template(self, messages: Messages, **template_options: Any) -> list[list[int]]:
        """Return one prompt of token ids per conversation."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise RequestError("chat needs a tokenizer with a chat template; use generate instead")
        options = {"add_generation_prompt": True, **template_options, "tokenize": False}
        prompts = []
        for conversation in as_conversations(messages):
            try:
                text = tokenizer.apply_chat_template(conversation, **options)
            except TemplateError as error:
                raise RequestError(f"the chat template refused the messages: {error}") from error
            check_text("a message", text)
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
        return prompts

    def add_request(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> int:
        """Queue one prompt for `step`; returns its seq_id."""
        params = SamplingParams() if sampling_params is None else sampling_params
        return self.engine.add_request(prompt, params, cache_salt=cache_salt)

    def step(self) -> StepOutput:
        """Run one engine step: what `add_request` prompts finished, and the tokens it ran."""
        step = self._step()
        finished, self._unclaimed = self._unclaimed, []
        return replace(step, finished=finished, pieces=[])

    def is_finished(self) -> bool:
        return self.engine.is_finished() and not self._unclaimed

    def close(self) -> None:
        """Free the model and its cache; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(
        self, prompts: Prompts, params: Params, cache_salt: str | None, is_streaming: bool
    ) -> _Job:
        job = _Job()
        prompt_list = as_prompts(prompts)
        try:
            pairs = zip(prompt_list, as_params(params, len(prompt_list)), strict=True)
            for index, (prompt, param) in enumerate(pairs):
                seq_id = self.engine.add_request(
                    prompt, param, cache_salt=cache_salt, is_streaming=is_streaming
                )
                job.indexes[seq_id] = index
                self._jobs[seq_id] = job
        except BaseException:
            self._abort(job)
            raise
        return job

    def _step(self) -> StepOutput:
        """Step the engine and hand each result to whoever waits for it."""
        step = self.engine.step()
        for piece in step.pieces:
            job = self._jobs[piece.seq_id]
            job.pieces.append(replace(piece, index=job.indexes[piece.seq_id]))
        for output in step.finished:
            owner = self._jobs.pop(output.seq_id, None)
            if owner is None:
                self._unclaimed.append(output)
            else:
                owner.outputs.append(output)
                del owner.indexes[output.seq_id]
        return step

    def _abort(self, job: _Job) -> None:
        """Drop what a call still waits for, so that leaving it early holds no block."""
        for seq_id in job.indexes:
            self.engine.abort(seq_id)
            del self._jobs[seq_id]
        job.indexes.clear()


@dataclass(slots=True)
class _Job:
    """One `generate` or `stream` call: which prompts still run, and what has come for it."""

    indexes: dict[int, int] = field(default_factory=dict)  # seq_id -> place in the prompts
    outputs: list[RequestOutput] = field(default_factory=list)
    pieces: deque[StreamPiece] = field(default_factory=deque)


class Progress:
    """A progress bar over prompts that shows the speed of prefill and decode."""

    def __init__(self, num_prompts: int, is_shown: bool) -> None:
        self._bar = tqdm(
            total=num_prompts,
            desc="Generating",
            dynamic_ncols=True,
            disable=not is_shown or sys.stderr is None,
        )
        self._start = time.perf_counter()
        self._num_prefill = self._num_decode = 0

    def update(self, step: StepOutput, num_finished: int) -> None:
        self._num_prefill += step.num_prefill_tokens
        self._num_decode += step.num_decode_tokens
        seconds = time.perf_counter() - self._start
        prefill, decode = self._num_prefill / seconds, self._num_decode / seconds
        self._bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s", False)
        self._bar.update(num_finished - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def as_prompts(prompts: Prompts) -> list[str | list[int]]:
    """One prompt (a string, a list of ids) or several become a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise RequestError(f"prompts must be a string or a list, got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(cast("list[str | list[int]]", prompts))


def as_conversations(messages: Messages) -> list[list[dict[str, Any]]]:
    """One conversation or a list of them becomes a list; every message must be one."""
    if not messages:
        raise RequestError("the conversation is empty; give it at least one message")
    is_single = isinstance(messages, list) and isinstance(messages[0], dict)
    conversations = cast("list[list[dict[str, Any]]]", [messages] if is_single else messages)
    for conversation in conversations:
        if not isinstance(conversation, list) or not conversation:
            raise RequestError(f"not a list of messages, or an empty one: {conversation!r:.80}")
        for message in conversation:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise RequestError(f"a message needs a role and content, got {message!r:.80}")
    return conversations


def as_params(params: Params, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams serves every prompt; a list must match the prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling_params must be SamplingParams or a list, got {params!r:.80}")
    params = list(params)
    if not all(isinstance(param, SamplingParams) for param in params):
        raise RequestError(f"sampling_params must be SamplingParams or a list, got {params!r:.80}")
    if len(params) != num_prompts:
        raise RequestError(f"got {len(params)} SamplingParams for {num_prompts} prompts")
    return params
