"""A worker: builds model and cache on one device, then serves plans.

The workers of a group get the same plans in the same order, and each runs its share of the model.
"""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import torch

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import ExecutorInfo, IntColumn, StepPlan, StepResult
from nanovllm.errors import ConfigError
from nanovllm.kernels.kv_layout import KVCacheSpec
from nanovllm.layers.build import Build
from nanovllm.models.decoder import DecoderModel
from nanovllm.models.registry import build_model
from nanovllm.pending import Pending
from nanovllm.worker.backend import Backend
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.kv_cache import choose_num_blocks, kv_cache_spec
from nanovllm.worker.loader import fill_dummy_weights, load_weights
from nanovllm.worker.memory import check_memory, is_shortage
from nanovllm.worker.stored_weights import choose_weight_format
from nanovllm.worker.tables import SlotTables

logger = logging.getLogger(__name__)


class Worker:
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        backend: Backend,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.checkpoint = checkpoint
        self.backend = backend
        self.platform, self.group = backend.platform, backend.group

    def start(self) -> ExecutorInfo:
        try:
            with torch.inference_mode(), self.platform.in_order():
                return self._start()
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            raise ConfigError(
                f"there is not enough memory for {self.config.model} with these options; use a "
                "smaller model, lower max_num_batched_tokens, max_num_seqs or num_kvcache_blocks, "
                f"or stop other processes ({error!s:.200})"
            ) from error

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        with torch.inference_mode(), self.platform.in_order():
            return self.runner.run(plan)

    def sample(self, masks: IntColumn) -> None:
        with torch.inference_mode(), self.platform.in_order():
            self.runner.sample(masks)

    def capture_one(self) -> bool:
        if self.runner.capture_one is None:
            return False
        with torch.inference_mode(), self.platform.in_order():
            return self.runner.capture_one()

    def _start(self) -> ExecutorInfo:
        config, platform, group, backend = self.config, self.platform, self.group, self.backend
        dtype = backend.dtype
        weight_format = choose_weight_format(config, self.checkpoint, platform, dtype)
        build = Build(platform.device, dtype, backend.attention, backend.ops, group, weight_format)
        check_memory(config, self.model_config, platform, build)
        self._agree(0)  # no rank loads before all have looked at what is free
        model = build_model(self.model_config, config.max_model_len, build)
        if config.load_format == "dummy":
            fill_dummy_weights(model, platform, config.seed)
        else:
            load_weights(model, self.checkpoint, platform, show_progress=group.rank == 0)
        spec = kv_cache_spec(config, self.model_config, dtype, group)
        largest_step = partial(self._largest_step, model, spec)
        backend.prepare(model, spec, largest_step)
        platform.profile(largest_step)
        num_blocks = self._agree(choose_num_blocks(config, spec, platform))
        caches = spec.views(platform.allocate_cache(num_blocks * spec.block_bytes), num_blocks)
        eager = EagerForward(model, self._tables(), backend.attention, caches)
        self.runner = backend.runner(eager)
        dtype_name = str(dtype).split(".")[-1]
        return ExecutorInfo(
            num_blocks, platform.depth, platform.name, dtype_name, platform.device_name
        )

    def _agree(self, num_blocks: int) -> int:
        """Return how many blocks every rank has room for."""
        smallest = self.group.smallest(num_blocks, self.platform.device)
        if smallest < num_blocks:
            logger.info("KV cache: %d blocks, as another rank has no room for more", smallest)
        return smallest

    def _tables(self) -> SlotTables:
        config = self.config
        return SlotTables(
            self.platform, config.max_num_seqs, config.max_model_len, config.kvcache_block_size
        )

    def _largest_step(self, model: DecoderModel, spec: KVCacheSpec) -> EagerForward:
        """Run as many tokens, and sample as many rows, as a step may have; they share blocks."""
        config, platform = self.config, self.platform
        num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        row_len = min(-(-config.max_num_batched_tokens // num_rows), config.max_model_len)
        num_blocks = -(-row_len // spec.block_size)
        cache = platform.allocate_cache(num_blocks * spec.block_bytes)
        tables = self._tables()
        tables.block_table[:, :num_blocks] = torch.arange(num_blocks, device=platform.device)
        column = np.ones(num_rows, np.int32)
        plan = StepPlan(
            slots=np.arange(num_rows, dtype=np.int32),
            starts=0 * column,
            counts=row_len * column,
            num_logits=column,
            new_rows=[],
            block_updates=[],
            released=[],
            num_decode_tokens=0,
        )
        caches = spec.views(cache, num_blocks)
        eager = EagerForward(model, tables, self.backend.attention, caches)
        self.backend.sampler(tables)(eager(plan), plan)
        return eager
