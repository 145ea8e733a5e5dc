"""Assemble an engine: find the model, choose device and executor, and create the engine core.

Only this file does so. It imports the parts on demand, so that a process without an engine core
needs no torch.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.find import Checkpoint, eos_token_ids, find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import DEFAULT_LEN, WHOLE_CONTEXT, EngineConfig, ModelConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.executor import Executor, ExecutorInfo
from nanovllm.engine.grammar import GrammarEngine
from nanovllm.engine.input_processor import InputProcessor, Vocabulary
from nanovllm.engine.prompt_budget import MIN_PROMPT_TOKENS, PromptBudget
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scoring import check_bidirectional
from nanovllm.engine.state_pool import StatePool
from nanovllm.engine.step import Pooling
from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from nanovllm.parallel.worker_main import WorkerTask
    from nanovllm.worker.device_interface import Device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The checkpoint and configuration of a model, and the engine options it runs with."""

    config: EngineConfig
    model_config: ModelConfig
    checkpoint: Checkpoint

    @property
    def default_pooling(self) -> Pooling | None:
        """The pooling of a model that only embeds; None for a model that generates."""
        if self.checkpoint.embedding is not None:
            return self.checkpoint.embedding.pooling
        return None if self.model_config.is_causal else "mean"

    def load_vocabulary(self) -> Vocabulary:
        tokenizer = None if self.config.skip_tokenizer_init else load_tokenizer(self.checkpoint)
        eos_ids = eos_token_ids(self.checkpoint)
        if not eos_ids and tokenizer is not None and tokenizer.eos_token_id is not None:
            eos_ids = (tokenizer.eos_token_id,)
        vocab_size = self.model_config.vocab_size
        return Vocabulary(tokenizer, frozenset(i for i in eos_ids if 0 <= i < vocab_size))


@dataclass(frozen=True, slots=True)
class StartedCore:
    core: EngineCore
    info: ExecutorInfo


def engine_config(model: object, options: Mapping[str, Any]) -> EngineConfig:
    """Create an EngineConfig from keyword arguments, which may include vLLM's options."""
    if not options.keys() <= EngineConfig.__dataclass_fields__.keys():
        from nanovllm.engine.engine_options import drop_vllm_options

        options = drop_vllm_options(options)
    return EngineConfig(str(model), **options)


def resolve_model(config: EngineConfig) -> ResolvedModel:
    """Find the model, and check that it can run here before its weights are downloaded."""
    from nanovllm.models.registry import read_config_for
    from nanovllm.worker.memory_check import check_model

    checkpoint = find_checkpoint(
        config.model,
        revision=config.revision,
        need_weights=config.load_format != "dummy",
        need_tokenizer=not config.skip_tokenizer_init,
        quantization=config.quantization,
        check=partial(check_model, config, _check_device(config)),
    )
    model_config = read_config_for(checkpoint.config, config.model_impl)
    if model_config.transformers_config is not None:
        logger.warning(
            "%s runs through transformers' model code, which is slower than nanovllm's own",
            model_config.architecture,
        )
    if checkpoint.embedding is not None:  # the LM head is not used, and may be missing
        model_config = replace(model_config, tie_word_embeddings=True)
    limit = model_config.max_position_embeddings
    config = _clamp_model_len(config, limit, f"the model's {limit}")
    if not model_config.is_causal:  # each prompt must run in one step
        check_bidirectional(config.attention_backend)
        most = config.max_num_batched_tokens
        config = _clamp_model_len(config, most, f"max_num_batched_tokens={most}")
        config = replace(config, attention_backend="sdpa", enable_prefix_caching=False)
    return ResolvedModel(config, model_config, checkpoint)


def _clamp_model_len(config: EngineConfig, limit: int, reason: str) -> EngineConfig:
    if config.max_model_len <= limit:
        return config
    if config.max_model_len not in (WHOLE_CONTEXT, DEFAULT_LEN):
        logger.warning("max_model_len=%d is clamped to %s", config.max_model_len, reason)
    return replace(config, max_model_len=limit)


def create_input_processor(resolved: ResolvedModel, is_remote: bool = False) -> InputProcessor:
    """Create the input processor; `is_remote` means that the engine core is in another process."""
    config, vocab_size = resolved.config, resolved.model_config.vocab_size
    if config.data_parallel_size > 1 and not is_remote:
        raise ConfigError(
            "data_parallel_size is supported by AsyncLLM, `nanovllm serve` and `batch`, not by LLM"
        )
    has_workers = is_remote or config.tensor_parallel_size > 1
    vocabulary = resolved.load_vocabulary()
    create = partial(create_grammars, vocab_size, lambda: vocabulary)
    return InputProcessor(
        vocabulary,
        vocab_size,
        config.seed,
        has_workers=has_workers,
        create_grammars=create,
        default_pooling=resolved.default_pooling,
    )


def create_grammars(vocab_size: int, load: Callable[[], Vocabulary]) -> GrammarEngine:
    """Create the grammar engine, which calls `load` when it first needs the tokenizer."""
    from nanovllm.structured.guidance import GuidanceEngine

    return GuidanceEngine(load, vocab_size)


def start_core(resolved: ResolvedModel, get_grammars: Callable[[], GrammarEngine]) -> StartedCore:
    """Load the model and create its engine core; `get_grammars` always returns the same engine."""
    config = resolved.config
    executor = create_executor(config, resolved.model_config, resolved.checkpoint)
    info = executor.start()
    try:
        counts, sizes = info.states, (info.num_blocks, config.kvcache_block_size)
        states = None if counts is None else StatePool(counts, config.kvcache_block_size)
        num_slots = config.max_num_seqs if counts is None else counts.num_slots
        blocks = BlockManager(*sizes, config.enable_prefix_caching, states)
        prompt_budget = None
        if (target := config.target_inter_token_ms) is not None:
            prompt_budget = PromptBudget(target / 1000, MIN_PROMPT_TOKENS[info.device])
        max_tokens = config.max_num_batched_tokens
        drafter = None
        if (speculative := config.speculative) is not None:
            from nanovllm.engine.drafter import create_drafter

            drafter = create_drafter(speculative.method, speculative.num_speculative_tokens)
        allow_chunks = resolved.model_config.is_causal
        scheduler = Scheduler(blocks, num_slots, max_tokens, prompt_budget, drafter, allow_chunks)
        depth = info.depth if config.depth is None else config.depth
        core = EngineCore(scheduler, executor, depth, config.max_model_len, get_grammars)
        # A full garbage collection takes 60 ms, as it visits every imported module. After this
        # one, the next runs only once the number of long-lived objects has grown by a quarter.
        gc.collect()
    except BaseException:  # after Ctrl-C in a REPL, the traceback would keep the workers alive
        executor.close()
        raise
    if core.max_len < config.max_model_len:
        logger.warning(
            "The KV cache holds %d tokens, fewer than max_model_len=%d; sequences end at that "
            "length",
            core.max_len,
            config.max_model_len,
        )
    return StartedCore(core, info)


def create_executor(
    config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
) -> Executor:
    """Create a worker in this process, or workers in other processes or on a Ray cluster."""
    if config.distributed_executor_backend == "ray" or config.tensor_parallel_size > 1:
        from nanovllm.parallel.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor(config, model_config, checkpoint, build_worker)
    from nanovllm.worker.worker import Worker

    return Worker(config, model_config, checkpoint, _create_device(config))


def build_worker(task: WorkerTask, rank: int) -> Executor:
    """Build the worker of one rank, in its process: its device, process group and model shard."""
    from nanovllm.devices.choose import create_device
    from nanovllm.parallel.worker_main import join_group
    from nanovllm.worker.worker import Worker

    device = create_device(task.config, join_group(task, rank))
    return Worker(task.config, task.model_config, task.checkpoint, device)


def _check_device(config: EngineConfig) -> Device | None:
    """Return the device to check a model against; None if only rank processes may use one."""
    if not _has_devices():
        return _create_device(config)
    from nanovllm.devices.choose import check_device

    return check_device(config)


def _create_device(config: EngineConfig) -> Device:
    if not _has_devices():
        from nanovllm.worker.torch_device import TorchDevice

        return TorchDevice(config)
    from nanovllm.devices.choose import create_device

    return create_device(config)


def _has_devices() -> bool:
    """Return whether `devices/` with the kernels is installed; otherwise plain torch is used."""
    return find_spec("nanovllm.devices") is not None
