"""LLM: offline generation and chat."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanovllm.assembly import create_input_processor, engine_config, resolve_model, start_core
from nanovllm.config import EngineConfig
from nanovllm.engine.added_requests import AddedRequests
from nanovllm.engine.conversations import ChatOptions, Messages, prompts_of, template_options
from nanovllm.engine.engine_thread import EngineThread
from nanovllm.engine.output_processor import RequestState
from nanovllm.engine.progress_bar import with_progress_bar
from nanovllm.engine.prompts import Params, Prompts, as_params, split_prompts, with_params
from nanovllm.engine.reranking import rerank
from nanovllm.engine.scoring import embedding_of, score
from nanovllm.engine.step import Pooling
from nanovllm.errors import RequestError, at_index
from nanovllm.outputs import (
    EmbeddingOutput,
    RequestOutput,
    RerankOutput,
    Score,
    StepOutput,
    StreamPiece,
)
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack

    from nanovllm.engine.engine_options import EngineOptions


class LLM:
    """A language model for offline generation.

    >>> with LLM("smollm2") as llm:
    ...     print(llm.generate("The capital of France is")[0].text)

    Thread-safe: requests of several threads run in one batch, and each caller gets its own
    outputs.

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

    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Reply to one conversation or a list of them, formatted with the model's chat template.

        Options are the fields of `nanovllm.engine.conversations.ChatOptions`.
        """
        prompts = self.apply_chat_template(messages, **template_options(options))
        return self.generate(prompts, sampling_params, use_tqdm, cache_salt=cache_salt)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        *,
        cache_salt: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[StreamPiece, None, None]:
        """Like `chat`, but yield text as it is generated, as `stream` does."""
        prompts = self.apply_chat_template(messages, **template_options(options))
        return self.stream(prompts, sampling_params, cache_salt=cache_salt)

    def embed(
        self,
        prompts: Prompts,
        pooling: Literal["last", "mean"] | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Return an embedding for each prompt, computed in float32 from the model's hidden states.

        After the final norm, `pooling` takes the hidden state of the last token ("last") or the
        mean over all tokens ("mean"). The default is the checkpoint's own pooling. If it has none,
        the default is "mean" for bidirectional models and "last" for others. `normalize` scales
        the embedding to length one.
        """
        is_valid = pooling in (None, "last", "mean")
        require(is_valid, "pooling", '"last" or "mean"', pooling)
        chosen: Pooling = pooling or self.engine.input_processor.default_pooling or "last"
        params = SamplingParams(max_tokens=1)
        outputs = self._complete(prompts, params, cache_salt, use_tqdm, pooling=chosen)
        return [embedding_of(output, normalize) for output in outputs]

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
    ) -> list[RerankOutput]:
        """Return the documents (at most `top_n`), the most relevant to the query first.

        With Qwen3-Reranker's prompt, the model judges whether a document meets the query and the
        `instruction`. The document's relevance is the probability of "yes" in a softmax over the
        logits of "yes" and "no".
        """
        input_processor = self.engine.input_processor
        return rerank(self._complete, input_processor, query, documents, instruction, top_n)

    def score(
        self, prompt: Prompts, continuations: Sequence[Any], *, cache_salt: str | None = None
    ) -> list[Score]:
        """Return the logprobs of each continuation (text or token ids) of a prompt.

        Text is tokenized together with the prompt, since a token may span the boundary.
        """
        encode = self.engine.input_processor.token_ids_of
        return score(self._complete, encode, prompt, continuations, cache_salt)

    def apply_chat_template(self, messages: Messages, **options: Any) -> list[list[int]]:
        """Return one prompt of token ids per conversation."""
        return prompts_of(self.engine.input_processor, messages, **options)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer; raise RequestError if `skip_tokenizer_init` is set."""
        return self.engine.input_processor.get_tokenizer()

    def add_request(
        self,
        prompt: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> int:
        """Queue one prompt for `step`; return its seq_id."""
        params = SamplingParams() if sampling_params is None else sampling_params
        state = self.engine.prepare(
            prompt, params, cache_salt, is_streaming=True, request_id=request_id
        )
        self.engine.call(partial(self.added.submit, state))
        return state.seq_id

    def step(self) -> StepOutput:
        """Run one engine step; return the new outputs of the requests from `add_request`.

        `pieces` holds the new tokens and text, `finished` the outputs of requests that finished.
        """
        return self.engine.call(self.added.step)

    def is_finished(self) -> bool:
        """Return whether all requests have finished, and `step` has returned their outputs."""
        return self.engine.call(self.added.is_finished)

    def abort(self, seq_id: int | str) -> RequestOutput | None:
        """Abort a request, given its seq_id or request_id.

        Returns its partial output, or None if it is not running.
        """
        return self.engine.call(partial(self.added.abort, seq_id))

    def abort_all(self) -> list[RequestOutput]:
        """Abort all requests of all callers; return their partial outputs."""
        return self.engine.call(self.added.abort_all)

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
