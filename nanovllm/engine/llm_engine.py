"""LLMEngine: tokenizer + core + detokenizer. Prompts in, RequestOutputs out, one step at a time."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from array import array
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from nanovllm.checkpoint.find import eos_token_ids, find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.detokenizer import Detokenizer, decode
from nanovllm.engine.pacing import Pacer
from nanovllm.engine.request import Ending, Request
from nanovllm.engine.scheduler import Scheduler
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

CLOSED = "the engine is closed; make a new one"
BROKEN_LOGITS = (
    "the model's logits are not numbers (NaN or infinity), so nothing can be sampled from them; "
    "the weights may be damaged, or too large for the dtype: try dtype='float32'"
)


@dataclass(slots=True, eq=False)
class Live:
    """What the front keeps of a request until it is answered."""

    request: Request
    prompt: str | None
    is_streaming: bool
    detokenizer: Detokenizer | None
    new_token_ids: list[int] = field(default_factory=list)  # not streamed yet


class LLMEngine:
    """`add_request` as often as you like, then `step` until `is_finished`.

    Any thread may `prepare` requests; everything else is for one thread at a time, and for one
    that no signal interrupts: `LLM` gives an engine a thread of its own.
    """

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
        self._live: dict[int, Live] = {}
        self._seq_ids = itertools.count()
        self._tokenizing = threading.Lock()  # to encode may change a tokenizer's settings
        self._is_closed = False

    def _make_core(self, executor: Executor) -> EngineCore:
        config, info = self.config, self.info
        blocks = BlockManager(
            info.num_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        target = config.target_inter_token_ms
        pacer = None if target is None else Pacer(target / 1000)
        scheduler = Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens, pacer)
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
        live = self.prepare(prompt, params, cache_salt=cache_salt, is_streaming=is_streaming)
        self.submit(live)
        return live.request.seq_id

    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = False,
    ) -> Live:
        """Check and tokenise a prompt; `submit` queues what this returns. Safe in any thread."""
        self.raise_if_closed()
        self._check_params(params)
        if cache_salt is not None:
            check_text("cache_salt", cache_salt)
        text, token_ids = self._encode(prompt)
        detokenizer = None
        if self.tokenizer is not None and (is_streaming or params.stop):
            detokenizer = Detokenizer(self.tokenizer, params)
        seq_id = next(self._seq_ids)
        request = Request(
            seq_id,
            token_ids,
            params,
            self._seed(params, seq_id),
            self._stop_token_ids(params),
            cache_salt,
            is_streaming=is_streaming or detokenizer is not None,
        )
        self.core.check(request)
        return Live(request, text, is_streaming, detokenizer)

    def submit(self, live: Live) -> None:
        """Queue a prepared request."""
        self.raise_if_closed()
        self.core.add(live.request)
        self._live[live.request.seq_id] = live

    def step(self) -> StepOutput:
        """Run one step of the loop; what it returns may stem from an earlier one in flight."""
        self.raise_if_closed()
        step = self.core.step()
        endings = {ending.seq_id: ending for ending in step.endings}
        for seq_id, token_id in zip(step.seq_ids, step.token_ids, strict=True):
            if self._push(self._live[seq_id], token_id):
                ending = endings.get(seq_id) or self.core.finish(seq_id, "stop")
                assert ending is not None
                endings[seq_id] = replace(ending, finish_reason="stop")
        outputs = {seq_id: self._output(ending) for seq_id, ending in endings.items()}
        lives = [self._live[seq_id] for seq_id in dict.fromkeys((*step.seq_ids, *outputs))]
        pieces = [_piece(live, outputs) for live in lives if live.is_streaming]
        for seq_id in outputs:
            del self._live[seq_id]
        return StepOutput(
            list(outputs.values()), pieces, step.num_prefill_tokens, step.num_decode_tokens
        )

    def is_finished(self) -> bool:
        return not self.core.has_unfinished

    def abort(self, seq_id: int) -> RequestOutput | None:
        """End a request now; returns what it had, or None when it is not running."""
        ending = self.core.finish(seq_id, "abort")
        if ending is None:
            return None
        output = self._output(ending)
        del self._live[seq_id]
        return output

    def drop(self, seq_id: int) -> None:
        """End a request of which nothing more is wanted."""
        self.core.finish(seq_id, "abort")
        self._live.pop(seq_id, None)

    def abort_all(self) -> list[RequestOutput]:
        """End every request now; returns what each had."""
        outputs = [self.abort(seq_id) for seq_id in list(self._live)]
        return [output for output in outputs if output is not None]

    def close(self) -> None:
        """Free the model and the cache; a second call does nothing."""
        self._is_closed = True
        self.core.executor.close()

    def raise_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError(CLOSED)

    def _push(self, live: Live, token_id: int) -> bool:
        """Add a token to a request's text; True when it completes a stop string."""
        live.new_token_ids.append(token_id)
        return live.detokenizer is not None and live.detokenizer.push(token_id)

    def _output(self, ending: Ending) -> RequestOutput:
        live = self._live[ending.seq_id]
        request, token_ids = live.request, ending.token_ids
        if live.detokenizer is not None:
            live.detokenizer.finish()
            text = live.detokenizer.text
        else:
            tokenizer = self.tokenizer
            text = "" if tokenizer is None else decode(tokenizer, token_ids, request.params)
        first = ending.first_token_time
        return RequestOutput(
            seq_id=ending.seq_id,
            prompt=live.prompt,
            prompt_token_ids=request.token_ids.tolist(),
            text=text,
            token_ids=token_ids,
            finish_reason=ending.finish_reason,
            num_cached_tokens=ending.num_cached_tokens,
            time_to_first_token=first - request.arrival_time if first else 0.0,
            duration=ending.end_time - request.arrival_time,
            error=BROKEN_LOGITS if ending.finish_reason == "error" else None,
        )

    def encode(self, text: str, **options: Any) -> list[int]:
        """Tokenise text. Safe in any thread."""
        assert self.tokenizer is not None
        with self._tokenizing:
            ids: list[int] = self.tokenizer.encode(text, **options)
        return ids

    def _encode(self, prompt: str | list[int]) -> tuple[str | None, array[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "text prompts need a tokenizer; skip_tokenizer_init=True takes ids"
                )
            check_text("the prompt", prompt)
            ids = self.encode(prompt)
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


def _piece(live: Live, outputs: dict[int, RequestOutput]) -> StreamPiece:
    """Take what is new in a streamed request."""
    token_ids, live.new_token_ids = live.new_token_ids, []
    text = live.detokenizer.take() if live.detokenizer is not None else ""
    seq_id = live.request.seq_id
    return StreamPiece(seq_id, text, token_ids, outputs.get(seq_id))


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
    return replace(config, max_model_len=limit)
