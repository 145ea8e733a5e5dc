"""From a config to a running engine: find the model, load its tokenizer, start its core.

A front whose core runs in another process imports this file but no torch, so the functions that
run beside the model import what they need themselves.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from nanovllm.checkpoint.find import Checkpoint, eos_token_ids, find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import WHOLE_CONTEXT, EngineConfig, ModelConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.front import Front, Vocabulary
from nanovllm.engine.prompt_budget import PromptBudget
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import Executor, ExecutorInfo
from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from nanovllm.structured.matching import Grammars

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that can run here, and the options with which it will."""

    config: EngineConfig
    model_config: ModelConfig
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class StartedCore:
    core: EngineCore
    info: ExecutorInfo


def find_model(config: EngineConfig) -> FoundModel:
    from nanovllm.devices.choose import check_device
    from nanovllm.models.registry import read_config
    from nanovllm.worker.memory import check_model

    checkpoint = find_checkpoint(
        config.model,
        revision=config.revision,
        need_weights=config.load_format != "dummy",
        need_tokenizer=not config.skip_tokenizer_init,
        quantization=config.quantization,
        check=partial(check_model, config, check_device(config)),
    )
    model_config = read_config(checkpoint.config)
    return FoundModel(clamp_model_len(config, model_config), model_config, checkpoint)


def clamp_model_len(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    limit = model_config.max_position_embeddings
    if config.max_model_len <= limit:
        return config
    if config.max_model_len != WHOLE_CONTEXT:
        logger.warning("max_model_len=%d is clamped to the model's %d", config.max_model_len, limit)
    return replace(config, max_model_len=limit)


def make_front(found: FoundModel, is_remote: bool = False) -> Front:
    """Load the tokenizer; a remote core, like workers, is in another process."""
    config = found.config
    if config.data_parallel_size > 1 and not is_remote:
        raise ConfigError("data_parallel_size is for AsyncLLM, `nanovllm serve` and `batch`")
    has_workers = is_remote or config.tensor_parallel_size > 1
    return Front(load_vocabulary(found), found.model_config.vocab_size, config.seed, has_workers)


def make_grammars(found: FoundModel) -> Grammars:
    """For a core in another process than its front."""
    from nanovllm.structured.matching import Grammars

    return Grammars(partial(load_vocabulary, found), found.model_config.vocab_size)


def load_vocabulary(found: FoundModel) -> Vocabulary:
    tokenizer = None if found.config.skip_tokenizer_init else load_tokenizer(found.checkpoint)
    eos_ids = eos_token_ids(found.checkpoint)
    if not eos_ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_ids = (tokenizer.eos_token_id,)
    vocab_size = found.model_config.vocab_size
    return Vocabulary(tokenizer, frozenset(i for i in eos_ids if 0 <= i < vocab_size))


def start_core(found: FoundModel, create_grammars: Callable[[], Grammars]) -> StartedCore:
    """Load the model and create its engine core."""
    config = found.config
    executor = create_executor(config, found.model_config, found.checkpoint)
    info = executor.start()
    try:
        blocks = BlockManager(
            info.num_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        target = config.target_inter_token_ms
        prompt_budget = None if target is None else PromptBudget(target / 1000)
        max_tokens = config.max_num_batched_tokens
        scheduler = Scheduler(blocks, config.max_num_seqs, max_tokens, prompt_budget)
        depth = info.depth if config.depth is None else config.depth
        core = EngineCore(scheduler, executor, depth, config.max_model_len, create_grammars)
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


def create_executor(
    config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
) -> Executor:
    """One worker in this process, several in their own, or on a Ray cluster."""
    if config.distributed_executor_backend == "ray" or config.tensor_parallel_size > 1:
        from nanovllm.parallel.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor(config, model_config, checkpoint)
    from nanovllm.devices.choose import create_device
    from nanovllm.worker.worker import Worker

    return Worker(config, model_config, checkpoint, create_device(config))
