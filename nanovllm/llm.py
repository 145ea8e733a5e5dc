"""LLM: offline generation."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.assembly import create_input_processor, engine_config, resolve_model, start_core
from nanovllm.config import EngineConfig
from nanovllm.engine.added_requests import AddedRequests, SteppingMethods
from nanovllm.engine.chat_methods import ChatMethods
from nanovllm.engine.engine_thread import EngineThread
from nanovllm.engine.output_processor import RequestState
from nanovllm.engine.progress_bar import with_progress_bar
from nanovllm.engine.prompts import Params, Prompts, as_params, split_prompts, with_params
from nanovllm.engine.scoring_methods import ScoringMethods
from nanovllm.errors import RequestError, at_index
from nanovllm.outputs import RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack

    from nanovllm.engine.engine_options import EngineOptions


class LLM(ChatMethods, ScoringMethods, SteppingMethods):
    """A language model for offline generation.

    >>> with LLM("smollm2") as llm:
    ...     print(llm.generate("The capital of France is")[0].text)

    Thread-safe: requests of several threads run in one batch, and each caller gets its own
    outputs.

    The base classes have the methods for chat, for embeddings and scores, and for stepping.

    Keyword arguments are the fields of `nanovllm.config.EngineConfig`. vLLM options that have no
    effect here are accepted with a warning; unknown options raise TypeError.
    """

    def __init__(self, model: str | Path, **options: Unpack[EngineOptions]) -> None:
        self.engine = create_engine(engine_config(model, options))
        self.added = AddedRequests(self.engine)
        # Close the engine when this object is collected or the interpreter exits.
        weakref.finalize(self, self.engine.close)
        self.engine.start()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts with continuous batching; return outputs in the prompts' order."""
        return self._complete(prompts, sampling_params, cache_salt, use_tqdm)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        cache_salt: str | None = None,
        on_refusal: Callable[[int, RequestError], None] | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """Like `generate`, but yield text as it is generated; closing the iterator aborts the rest.

        An invalid prompt raises RequestError. If `on_refusal` is given, it is called with the
        prompt's index and the error instead, and the other prompts run.
        """
        requests = self._prepare_all(
            prompts, sampling_params, cache_salt, on_refusal=on_refusal, is_streaming=True
        )
        yield from self.engine.run(requests, is_streaming=True)

    def generate_stream(
        self,
        prompts: Iterable[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Complete any number of prompts; yield the index and output of each as it finishes.

        Prompts are read lazily, as earlier ones finish. So are parameters if each prompt has its
        own.
        """
        requests = self._prepare(with_params(prompts, sampling_params), cache_salt)
        # As many requests wait as can run, so that the batch stays full.
        max_unfinished = 2 * self.engine.config.max_num_seqs
        run = self.engine.run(requests, is_streaming=True, max_unfinished=max_unfinished)
        with contextlib.closing(run) as pieces:
            for piece in pieces:
                assert piece.output is not None
                yield piece.index, piece.output

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer; raise RequestError if `skip_tokenizer_init` is set."""
        return self.engine.input_processor.get_tokenizer()

    def close(self) -> None:
        """Free the model and its KV cache after the current step; later calls do nothing."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepare(
        self,
        pairs: Iterable[tuple[Any, SamplingParams]],
        cache_salt: str | None,
        count: int | None = None,
        name: str = "prompts",
        on_refusal: Callable[[int, RequestError], None] | None = None,
        **options: Any,
    ) -> Iterator[RequestState]:
        """Validate and tokenize the prompts of one call, lazily; `count` is how many there are."""
        for index, (prompt, params) in enumerate(pairs):
            try:
                state = self.engine.prepare(prompt, params, cache_salt, index, **options)
            except RequestError as error:
                if on_refusal is None:
                    raise at_index(error, name, index, count) from error
                on_refusal(index, error)
            else:
                yield state

    def _prepare_all(
        self, prompts: Prompts, params: Params, cache_salt: str | None, **options: Any
    ) -> list[RequestState]:
        items = split_prompts(prompts)
        pairs = zip(items, as_params(params, len(items)), strict=True)
        return list(self._prepare(pairs, cache_salt, len(items), **options))

    def _complete(
        self,
        prompts: Prompts,
        params: Params,
        cache_salt: str | None = None,
        use_tqdm: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Run prompts to completion, optionally with a progress bar; return outputs in order."""
        requests = self._prepare_all(prompts, params, cache_salt, **options)
        pieces = self.engine.run(requests, is_streaming=False)
        if use_tqdm and sys.stderr is not None:
            pieces = with_progress_bar(pieces, len(requests))
        with contextlib.closing(pieces):
            outputs = {each.index: each.output for each in pieces if each.output is not None}
        return [outputs[state.index] for state in requests]


def create_engine(config: EngineConfig) -> EngineThread:
    import torch

    with torch.device("cpu"):  # override a default device that the caller may have set
        resolved = resolve_model(config)
        input_processor = create_input_processor(resolved)
        started = start_core(resolved, input_processor.get_grammars)
    configs = resolved.config, resolved.model_config
    return EngineThread(*configs, input_processor, started.core, started.info)
