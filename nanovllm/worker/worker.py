"""A worker builds the model and the KV cache on one device, then runs plans.

The workers of a group get the same plans in the same order, and each runs its shard of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Protocol

import torch

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.step import Bitmasks, IntColumn, Pending, StepPlan, StepResult
from nanovllm.errors import ConfigError
from nanovllm.worker.device_interface import Device
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.kv_cache import agree
from nanovllm.worker.load_model import load_model
from nanovllm.worker.memory_needs import MemoryNeeds, choose_num_blocks
from nanovllm.worker.model_runner import ModelRunner


class WorkerPart(Protocol):
    """What a feature adds to a worker."""

    def load(self, worker: Worker) -> MemoryNeeds:
        """Load models or weights; return what they need of the memory."""

    def profile(self) -> None:
        """Run the work that needs the most memory, unless the model's largest step needs more."""

    def attach(self, runner: ModelRunner, num_blocks: int, input_batch: InputBatch) -> None:
        """Add stages to the runner."""


class Worker:
    """One rank: the executor of a single-rank engine, or one of several workers."""

    runner: ModelRunner | None = None  # set between `start` and `close`

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        parts: Sequence[WorkerPart] = (),
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.checkpoint = checkpoint
        self.device, self.group = device, device.group
        self.parts = parts

    def start(self) -> ExecutorInfo:
        try:
            with torch.inference_mode(), self.device.in_order():
                return self._start()
        except (RuntimeError, MemoryError) as error:
            is_shortage = isinstance(error, torch.OutOfMemoryError | MemoryError)
            # torch has no exception type for a failed allocation on the CPU.
            if not is_shortage and "DefaultCPUAllocator" not in str(error):
                raise
            raise ConfigError(
                f"there is not enough memory for {self.config.model} with these options; use a "
                "smaller model, lower max_num_batched_tokens, max_num_seqs or num_kvcache_blocks, "
                f"or stop other processes ({error!s:.200})"
            ) from error

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        assert self.runner is not None, "submit after close"
        with torch.inference_mode(), self.device.in_order(int(plan.counts.sum())):
            return self.runner.run(plan)

    def sample(self, bitmasks: Bitmasks) -> None:
        assert self.runner is not None, "sample after close"
        with torch.inference_mode(), self.device.in_order():
            self.runner.sample(bitmasks)

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        return self.device.host_memory((num_rows, num_words))

    def capture_one(self) -> bool:
        assert self.runner is not None, "capture_one after close"
        if self.runner.steps is None:
            return False
        with torch.inference_mode(), self.device.in_order():
            return self.runner.steps.capture_one()

    def close(self) -> None:
        if self.runner is not None:
            device, self.runner, self.parts = self.device, None, ()
            del self.device  # the device may refer to the model
            device.release()

    def _start(self) -> ExecutorInfo:
        config, device = self.config, self.device
        added = [part.load(self) for part in self.parts]
        profiles = [part.profile for part in self.parts]
        target = load_model(config, self.model_config, self.checkpoint, device, profiles=profiles)
        counts = None if target.state_cache is None else target.state_cache.counts
        needs = reduce(MemoryNeeds.including, added, target.needs)
        num_blocks = agree(choose_num_blocks(config, needs, device), device)
        sizes = target.num_slots, config.max_model_len, config.kvcache_block_size
        input_batch = InputBatch(device, *sizes, needs.id_factors)
        self.runner = target.runner(num_blocks, input_batch)
        for part in self.parts:
            part.attach(self.runner, num_blocks, input_batch)
        dtype = str(target.model.dtype).split(".")[-1]
        return ExecutorInfo(
            *(num_blocks, device.depth, device.name, dtype, device.device_name, counts),
            windows=needs.windows,
        )
