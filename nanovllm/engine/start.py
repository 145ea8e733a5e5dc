"""From a config to a running core: find the model, choose where its workers run, load it."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from functools import partial

from nanovllm.checkpoint.find import Checkpoint, find_checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.devices.choose import check_device, create_device
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.found_model import FoundModel, clamp_model_len
from nanovllm.engine.prompt_budget import PromptBudget
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import Executor, ExecutorInfo, IntColumn, StepPlan, StepResult
from nanovllm.executor.multiproc import MultiprocExecutor
from nanovllm.grammar.matching import Grammars
from nanovllm.models.registry import read_config
from nanovllm.pending import Pending
from nanovllm.worker.memory import check_model
from nanovllm.worker.worker import Worker

logger = logging.getLogger(__name__)


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
    """Load the model and create its engine core."""
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


def create_executor(
    config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
) -> Executor:
    """One worker in this process, several in their own, or on a Ray cluster."""
    if config.distributed_executor_backend == "ray":
        from nanovllm.executor.ray_workers import start_actors

        return MultiprocExecutor(config, model_config, checkpoint, start_workers=start_actors)
    if config.tensor_parallel_size > 1:
        return MultiprocExecutor(config, model_config, checkpoint)
    return LocalExecutor(Worker(config, model_config, checkpoint, create_device(config)))


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


class LocalExecutor:
    """One worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker: Worker | None = worker  # None once closed

    def start(self) -> ExecutorInfo:
        assert self.worker is not None
        return self.worker.start()

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        assert self.worker is not None, "submit after close"
        return self.worker.run(plan)

    def sample(self, masks: IntColumn) -> None:
        assert self.worker is not None, "sample after close"
        self.worker.sample(masks)

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        assert self.worker is not None, "mask_memory after close"
        return self.worker.device.host_memory((num_rows, num_words))

    def capture_one(self) -> bool:
        assert self.worker is not None, "capture_one after close"
        return self.worker.capture_one()

    def close(self) -> None:
        if self.worker is not None:
            device, self.worker = self.worker.device, None
            device.release()
