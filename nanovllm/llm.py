"""LLM: offline generation and chat over an engine."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.chat_template import ChatTemplate
from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine, check_text
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput, StepOutput, StreamPiece
from nanovllm.prompts import (
    Messages,
    Params,
    Prompts,
    as_conversations,
    as_params,
    as_prompt,
    at_index,
    split_prompts,
)
from nanovllm.sampling_params import SamplingParams


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
        on_refusal: Callable[[int, RequestError], None] | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """Like `generate`, but yield text as it comes; closing the iterator aborts the rest.

        `on_step` sees every engine step before its pieces are yielded. With `on_refusal` a prompt
        that cannot run is reported by its index, and the others are answered; without, it raises.
        """
        job = self._submit(prompts, sampling_params, cache_salt, True, on_refusal)
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
        special_tokens = tokenizer.special_tokens_map
        template = ChatTemplate(tokenizer.chat_template, special_tokens, **template_options)
        prompts, conversations = [], as_conversations(messages)
        for index, conversation in enumerate(conversations):
            try:
                text = template.render(conversation)
                check_text("a message", text)
            except RequestError as error:
                raise at_index(error, "messages", index, len(conversations)) from error
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
        return prompts

    def add_request(
        self,
        prompt: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> int:
        """Queue one prompt for `step`; returns its seq_id."""
        params = SamplingParams() if sampling_params is None else sampling_params
        one = as_prompt(prompt, cache_salt)
        return self.engine.add_request(one.content, params, cache_salt=one.cache_salt)

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
        self,
        prompts: Prompts,
        params: Params,
        cache_salt: str | None,
        is_streaming: bool,
        on_refusal: Callable[[int, RequestError], None] | None = None,
    ) -> _Job:
        job = _Job()
        items = split_prompts(prompts)
        try:
            pairs = zip(items, as_params(params, len(items)), strict=True)
            for index, (item, param) in enumerate(pairs):
                try:
                    prompt = as_prompt(item, cache_salt)
                    seq_id = self.engine.add_request(
                        prompt.content,
                        param,
                        cache_salt=prompt.cache_salt,
                        is_streaming=is_streaming,
                    )
                except RequestError as error:
                    if on_refusal is None:
                        raise at_index(error, "prompts", index, len(items)) from error
                    on_refusal(index, error)
                    continue
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
