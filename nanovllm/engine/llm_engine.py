"""LLMEngine: tokenizer + core + detokenizer. Prompts in, RequestOutputs out, one step at a time."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from nanovllm.checkpoint.find import eos_token_ids, find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.detokenizer import Detokenizer, decode
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import EngineError, RequestError
from nanovllm.executor.base import Executor
from nanovllm.executor.local import LocalExecutor
from nanovllm.executor.multiproc import MultiprocExecutor
from nanovllm.models.registry import read_config
from nanovllm.outputs import RequestOutput, StepOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.memory import check_device, check_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """What the engine remembers of a request beside its sequence."""

    prompt: str | None
    params: SamplingParams
    is_streaming: bool
    detokenizer: Detokenizer | None
    num_seen: int = 0  # output tokens that were detokenised and streamed


class LLMEngine:
    """`add_request` as often as you like, then `step` until `is_finished`."""

    def __init__(self, config: EngineConfig) -> None:
        platform = check_device(config)
        checkpoint = find_checkpoint(
            config.model,
            revision=config.revision,
            need_weights=config.load_format != "dummy",
            need_tokenizer=not config.skip_tokenizer_init,
            check=partial(check_model, config, platform),
        )
        self.model_config = read_config(checkpoint.config)
        self.config = config = clamp_model_len(config, self.model_config)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(checkpoint)
        eos_ids = eos_token_ids(checkpoint) or self._tokenizer_eos()
        vocab_size = self.model_config.vocab_size
        self._eos_token_ids = frozenset(i for i in eos_ids if 0 <= i < vocab_size)

        kind = LocalExecutor if config.tensor_parallel_size == 1 else MultiprocExecutor
        executor: Executor = kind(config, self.model_config, checkpoint)
        self.info = executor.start()
        try:
            self.core = self._make_core(executor)
            # A full collection walks all that was imported, 60 ms amid a step. After one now, the
            # next comes when a quarter more objects than these have lived long.
            gc.collect()
        except BaseException:  # Ctrl-C: at a prompt its traceback would keep the workers
            executor.close()
            raise
        if self.core.max_len < config.max_model_len:
            logger.warning(
                "The KV cache holds %d tokens, fewer than max_model_len=%d: sequences end there",
                self.core.max_len,
                config.max_model_len,
            )
        self._live: dict[int, _Live] = {}
        self._finished: list[RequestOutput] = []  # for the next return of step
        self._pieces: list[StreamPiece] = []
        self._num_added = 0
        self._is_closed = False

    def _make_core(self, executor: Executor) -> EngineCore:
        config, info = self.config, self.info
        blocks = BlockManager(
            info.num_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        scheduler = Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens)
        depth = info.depth if config.depth is None else config.depth
        return EngineCore(scheduler, executor, depth, config.max_model_len)

    def add_request(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = False,
    ) -> int:
        """Queue a prompt and return its seq_id; a prompt that cannot run raises RequestError."""
        self._raise_if_closed()
        self._check_params(params)
        if cache_salt is not None:
            check_text("cache_salt", cache_salt)
        text, token_ids = self._encode(prompt)
        seq_id = self._num_added
        detokenizer = None
        if self.tokenizer is not None and (is_streaming or params.stop):
            detokenizer = Detokenizer(self.tokenizer, params)
        seq = Sequence(
            seq_id,
            token_ids,
            params,
            seed=self._seed(params, seq_id),
            stop_token_ids=self._stop_token_ids(params),
            cache_salt=cache_salt,
            is_streaming=is_streaming or detokenizer is not None,
        )
        self.core.add(seq)
        self._live[seq_id] = _Live(text, params, is_streaming, detokenizer)
        self._num_added += 1
        return seq_id

    def step(self) -> StepOutput:
        """Run one step of the loop; what it returns may stem from an earlier one in flight."""
        self._raise_if_closed()
        step = self.core.step()
        try:
            for seq in step.updated:
                self._update(seq)
        except BaseException:  # Ctrl-C: what was not seen now is seen in the next step
            self.core.report_again()
            raise
        finished, self._finished = self._finished, []
        pieces, self._pieces = self._pieces, []
        return StepOutput(finished, pieces, step.num_prefill_tokens, step.num_decode_tokens)

    def is_finished(self) -> bool:
        return not self.core.has_unfinished and not self._finished

    def abort(self, seq_id: int) -> RequestOutput | None:
        """End a request now; returns what it had, or None when it is not running."""
        self._finished = [output for output in self._finished if output.seq_id != seq_id]
        self._pieces = [piece for piece in self._pieces if piece.seq_id != seq_id]
        seq = self.core.finish(seq_id, "abort")
        if seq is None:
            return None
        return self._output(seq, self._live.pop(seq_id), "abort", num_tokens=None)

    def close(self) -> None:
        """Free the model and the cache; a second call does nothing."""
        self._is_closed = True
        self.core.executor.close()

    def _update(self, seq: Sequence) -> None:
        """Detokenise and stream what is new in a sequence, and answer the request if it is over."""
        live = self._live[seq.seq_id]
        reason, num_tokens = seq.finish_reason, None
        token_ids = seq.token_ids[seq.num_prompt_tokens + live.num_seen :].tolist()
        for token_id in token_ids:
            live.num_seen += 1
            if live.detokenizer is not None and live.detokenizer.push(token_id):
                reason, num_tokens = "stop", live.num_seen
                break
        output = None
        if reason is not None:
            output = self._output(seq, live, reason, num_tokens)
            self._finished.append(output)
            self.core.finish(seq.seq_id, reason)
            del self._live[seq.seq_id]
        if live.is_streaming:
            text = live.detokenizer.take() if live.detokenizer is not None else ""
            self._pieces.append(StreamPiece(seq.seq_id, text, token_ids, output))

    def _output(
        self, seq: Sequence, live: _Live, reason: str, num_tokens: int | None
    ) -> RequestOutput:
        token_ids = seq.output_token_ids[:num_tokens]
        if live.detokenizer is not None:
            for token_id in token_ids[live.num_seen :]:  # aborted before they were seen
                live.detokenizer.push(token_id)
            live.detokenizer.finish()
            text = live.detokenizer.text
        else:
            text = "" if self.tokenizer is None else decode(self.tokenizer, token_ids, live.params)
        first = seq.first_token_time
        return RequestOutput(
            seq_id=seq.seq_id,
            prompt=live.prompt,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens].tolist(),
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            num_cached_tokens=seq.num_cached,
            time_to_first_token=first - seq.arrival_time if first else 0.0,
            duration=time.perf_counter() - seq.arrival_time,
        )

    def _encode(self, prompt: str | list[int]) -> tuple[str | None, array[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "text prompts need a tokenizer; skip_tokenizer_init=True takes ids"
                )
            check_text("the prompt", prompt)
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list):
            ids = prompt
        else:
            raise RequestError(f"a prompt is a string or a list of token ids, got {prompt!r:.80}")
        if not ids:
            raise RequestError("the prompt is empty; give it at least one token")
        token_ids = to_token_ids(ids, self.model_config.vocab_size)
        return (prompt if isinstance(prompt, str) else None), token_ids

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be SamplingParams, got {params!r:.80}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids instead")
        high = max(params.stop_token_ids, default=0)
        if high >= self.model_config.vocab_size:
            raise RequestError(
                f"stop_token_ids has {high}, outside the vocabulary "
                f"of {self.model_config.vocab_size}"
            )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        return eos.union(params.stop_token_ids)

    def _seed(self, params: SamplingParams, seq_id: int) -> int:
        """A 64-bit seed: the request's own, or one derived from the engine's for this request."""
        if params.seed is None:
            seed = xxhash.xxh3_64_intdigest(f"{self.config.seed}/{seq_id}".encode())
        else:
            seed = params.seed % 2**64
        return seed - 2**64 if seed >= 2**63 else seed

    def _tokenizer_eos(self) -> tuple[int, ...]:
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return () if eos is None else (eos,)

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed; make a new one")


def check_text(name: str, text: object) -> None:
    """Refuse what a tokenizer or a hash could not encode."""
    if not isinstance(text, str):
        raise RequestError(f"{name} must be a string, got {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode ({error}); clean it first") from error


def to_token_ids(ids: list[int], vocab_size: int) -> array[int]:
    """Check ids without a loop over what may be many thousands, and lay them out side by side."""
    try:
        values = np.array(array("L", ids))  # several times as fast as a conversion with a sign
        has_bool = any(isinstance(ids[i], bool) for i in np.flatnonzero(values <= 1))
        if not has_bool and values.max() < vocab_size:
            return array("i", values.astype(np.int32).tobytes())
    except (TypeError, OverflowError):
        pass  # what is wrong is said below
    types = set(map(type, ids))
    if bool in types or not all(issubclass(each, (int, np.integer)) for each in types):
        raise RequestError(f"a prompt's token ids are integers, got {ids!r:.80}")
    wrong = min(ids) if min(ids) < 0 else max(ids)
    raise RequestError(f"token id {wrong} is outside the model's vocabulary of {vocab_size}")


def clamp_model_len(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    limit = model_config.max_position_embeddings
    if config.max_model_len <= limit:
        return config
    logger.warning("max_model_len=%d is clamped to the model's %d", config.max_model_len, limit)
    return dataclasses.replace(config, max_model_len=limit)
