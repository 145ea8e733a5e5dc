"""LLMEngine: a front and a core. Prompts in, RequestOutputs out, one step at a time."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.config import EngineConfig
from nanovllm.devices.choose import check_device
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.found_model import FoundModel, clamp_model_len, make_front
from nanovllm.engine.front import Live
from nanovllm.engine.prompt_budget import PromptBudget
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import ExecutorInfo, Pooling
from nanovllm.errors import EngineError
from nanovllm.executor.base import Executor
from nanovllm.executor.create import create_executor
from nanovllm.grammar.matching import Grammars
from nanovllm.models.registry import read_config
from nanovllm.outputs import RequestOutput, StepOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.memory import check_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CLOSED = "the engine is closed; make a new one"


class LLMEngine:
    """`add_request` as often as you like, then `step` until `is_finished`.

    Any thread may `prepare` requests; everything else is for one thread at a time, and for one
    that no signal interrupts: `LLM` gives an engine a thread of its own.
    """

    def __init__(self, config: EngineConfig) -> None:
        found = find_model(config)
        self.config, self.model_config = found.config, found.model_config
        self.front = make_front(found)
        started = start_core(found, self.front.grammars)
        self.core, self.info = started.core, started.info
        self._is_closed = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.front.tokenizer

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
        return live.seq_id

    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = False,
        pooling: Pooling | None = None,
        request_id: str | None = None,
    ) -> Live:
        """Check and tokenise a prompt; `submit` queues what this returns. Safe in any thread."""
        self.raise_if_closed()
        live = self.front.prepare(prompt, params, cache_salt, is_streaming, pooling, request_id)
        self.core.check(live.samples[0].request)
        return live

    def submit(self, live: Live) -> None:
        """Queue a prepared request."""
        self.raise_if_closed()
        for sample in live.samples:
            self.core.add(sample.request)
        self.front.submit(live)

    def step(self) -> StepOutput:
        """Run one step of the loop; what it returns may stem from an earlier one in flight."""
        self.raise_if_closed()
        return self.front.collect(self.core.step(), self.core.finish)

    def is_finished(self) -> bool:
        return not self.core.has_unfinished

    def abort(self, seq_id: int) -> RequestOutput | None:
        """End a request now; returns what it had, or None when it is not running."""
        for each in self.front.unfinished(seq_id):
            ending = self.core.finish(each, "abort")
            output = None if ending is None else self.front.end(ending)
            if output is not None:
                return output
        return None

    def drop(self, seq_id: int) -> None:
        """End a request of which nothing more is wanted."""
        for each in self.front.unfinished(seq_id):
            self.core.finish(each, "abort")
        self.front.forget(seq_id)

    def abort_all(self) -> list[RequestOutput]:
        """End every request now; returns what each had."""
        outputs = [self.abort(seq_id) for seq_id in list(self.front.live)]
        return [output for output in outputs if output is not None]

    def close(self) -> None:
        """Free the model and the cache; a second call does nothing."""
        self._is_closed = True
        self.front.grammars.close()
        self.core.executor.close()

    def raise_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError(CLOSED)


def find_model(config: EngineConfig) -> FoundModel:
    device = check_device(config)
    checkpoint = find_checkpoint(
        config.model,
        revision=config.revision,
        need_weights=config.load_format != "dummy",
        need_tokenizer=not config.skip_tokenizer_init,
        quantization=config.quantization,
        check=partial(check_model, config, device),
    )
    model_config = read_config(checkpoint.config)
    return FoundModel(clamp_model_len(config, model_config), model_config, checkpoint)


@dataclass(frozen=True, slots=True)
class StartedCore:
    core: EngineCore
    info: ExecutorInfo


def start_core(found: FoundModel, grammars: Grammars) -> StartedCore:
    """Load the model and make what runs it."""
    config = found.config
    executor = create_executor(config, found.model_config, found.checkpoint)
    info = executor.start()
    try:
        core = make_core(config, executor, info, grammars)
        # A full collection walks all that was imported, 60 ms amid a step. After one now, the
        # next comes when a quarter more objects than these have lived long.
        gc.collect()
    except BaseException:  # Ctrl-C: at a prompt its traceback would keep the workers
        executor.close()
        raise
    if core.max_len < config.max_model_len:
        logger.warning(
            "The KV cache holds %d tokens, fewer than max_model_len=%d: sequences end there",
            core.max_len,
            config.max_model_len,
        )
    return StartedCore(core, info)


def make_core(
    config: EngineConfig, executor: Executor, info: ExecutorInfo, grammars: Grammars
) -> EngineCore:
    blocks = BlockManager(info.num_blocks, config.kvcache_block_size, config.enable_prefix_caching)
    target = config.target_inter_token_ms
    prompt_budget = None if target is None else PromptBudget(target / 1000)
    max_tokens = config.max_num_batched_tokens
    scheduler = Scheduler(blocks, config.max_num_seqs, max_tokens, prompt_budget)
    depth = info.depth if config.depth is None else config.depth
    return EngineCore(scheduler, executor, depth, config.max_model_len, grammars)
