"""A worker builds the model and the KV cache on one device, then runs plans.

The workers of a group get the same plans in the same order, and each runs its shard of the model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend
from nanovllm.checkpoint.find import Checkpoint, find_checkpoint, stores_quantized
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import (
    ExecutorInfo,
    IntColumn,
    Pending,
    StateCounts,
    StepPlan,
    StepResult,
)
from nanovllm.errors import ConfigError
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import build_model, read_config
from nanovllm.ops.interface import LayerCache, LayerState
from nanovllm.worker.device_interface import Device
from nanovllm.worker.draft_model import DraftModel
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.kv_cache import KVCacheSpec, choose_num_blocks, kv_cache_spec
from nanovllm.worker.loader import load_dense, load_weights
from nanovllm.worker.memory_check import check_memory, estimate_memory
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.profile_run import profile_run
from nanovllm.worker.quantized_layouts import choose_layouts
from nanovllm.worker.state_cache import (
    StateCache,
    StateSpec,
    choose_state_counts,
    state_spec,
)

if TYPE_CHECKING:
    from nanovllm.models.registry import Model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    spec: KVCacheSpec
    attention: AttentionBackend
    device: Device
    state_cache: StateCache | None  # set if the model has recurrent layers
    num_slots: int  # of the InputBatch

    def runner(self, num_blocks: int, input_batch: InputBatch) -> ModelRunner:
        """Allocate the KV cache, and create the runner."""
        cache = self.device.allocate_cache(num_blocks * self.spec.block_bytes)
        return self.device.runner(self.eager(cache, num_blocks, input_batch))

    def eager(self, cache: Tensor, num_blocks: int, input_batch: InputBatch) -> EagerForward:
        caches: list[LayerCache | LayerState] = [*self.spec.views(cache, num_blocks)]
        if self.state_cache is not None:
            for index, state in self.state_cache.layers.items():
                caches.insert(index, state)
        return EagerForward(self.model, input_batch, self.attention, caches, self.state_cache)


class Worker:
    """One rank: the executor of a single-rank engine, or one of several workers."""

    runner: ModelRunner | None = None  # set between `start` and `close`

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.checkpoint = checkpoint
        self.device, self.group = device, device.group

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
        with torch.inference_mode(), self.device.in_order():
            return self.runner.run(plan)

    def sample(self, masks: IntColumn) -> None:
        assert self.runner is not None, "sample after close"
        with torch.inference_mode(), self.device.in_order():
            self.runner.sample(masks)

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
            device, self.runner = self.device, None
            del self.device  # the device may refer to the model
            device.release()

    def _start(self) -> ExecutorInfo:
        config, device = self.config, self.device
        draft = self._load_draft_model()
        target = self._load(config, self.model_config, self.checkpoint, device)
        counts = None if target.state_cache is None else target.state_cache.counts
        models = [target] if draft is None else [target, draft]
        block_bytes = sum(model.spec.block_bytes for model in models)
        num_blocks = self._agree(choose_num_blocks(config, block_bytes, device))
        sizes = target.num_slots, config.max_model_len, config.kvcache_block_size
        input_batch = InputBatch(device, *sizes)
        self.runner = target.runner(num_blocks, input_batch)
        if draft is not None:
            self.runner.draft_model = DraftModel(draft.runner(num_blocks, input_batch))
        dtype = str(target.model.dtype).split(".")[-1]
        return ExecutorInfo(
            num_blocks, device.depth, device.name, dtype, device.device_name, counts
        )

    def _load(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
    ) -> LoadedModel:
        """Build a model, load its weights and compile its kernels."""
        dtype = device.choose_dtype(config.dtype, model_config.dtype)
        ops = device.ops(dtype)
        attention = device.attention(dtype, ops)
        layouts = None
        if config.quantization is not None or stores_quantized(checkpoint.config):
            layouts = choose_layouts(config, checkpoint, device, dtype)
        build = BuildContext(device.torch_device, dtype, attention, ops, self.group, layouts)
        check_memory(config, model_config, device, build)
        self._agree(0)  # a barrier: no rank loads before all have measured the free memory
        model = self._load_weights(config, model_config, checkpoint, device, build)
        if checkpoint.embedding is not None and config.load_format != "dummy":
            folders = checkpoint.embedding.dense
            model.dense.extend(load_dense(folders, model_config.hidden_size, build.device))
        spec = kv_cache_spec(config, model_config, dtype, self.group)
        state_cache, num_slots = None, config.max_num_rows
        if model_config.recurrent is not None:  # before `prepare`, whose largest step needs it
            step_bytes = estimate_memory(config, model_config, build).step
            state_cache = self._create_state_cache(
                state_spec(model_config.recurrent, dtype, self.group),
                spec,
                device.cache_budget(step_bytes),
            )
            num_slots = state_cache.counts.num_slots
        loaded = LoadedModel(model, spec, attention, device, state_cache, num_slots)
        device.prepare(model, spec, partial(profile_run, config, loaded))
        return loaded

    def _create_state_cache(self, spec: StateSpec, cache: KVCacheSpec, budget: int) -> StateCache:
        """Allocate the recurrent states; the KV cache gets the rest of the budget."""
        counts = choose_state_counts(self.config, spec, cache, budget)
        sizes = counts.num_slots, counts.num_snapshots
        counts = StateCounts(*(self._agree(size) for size in sizes))
        return StateCache(spec, counts, self.device)

    def _load_weights(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        build: BuildContext,
    ) -> Model:
        is_dummy = config.load_format == "dummy"
        if model_config.transformers_config is not None:
            from nanovllm.models.transformers_family import load_model

            loaded = load_model(model_config, None if is_dummy else checkpoint, config.seed, build)
            loaded.pack_linears(device.has_room_for_copy(loaded.num_bytes))
            device.release()
            return loaded
        model = build_model(model_config, config.max_model_len, build)
        if is_dummy:
            from nanovllm.worker.dummy_weights import fill_dummy_weights

            fill_dummy_weights(model, device, config.seed)
        else:
            load_weights(model, checkpoint, device, show_progress=self.group.rank == 0)
        return model

    def _load_draft_model(self) -> LoadedModel | None:
        path = self.config.draft_model
        if path is None:
            return None
        config = replace(
            self.config, model=path, revision=None, quantization=None, speculative_config=None
        )
        has_weights = config.load_format != "dummy"
        checkpoint = find_checkpoint(path, need_weights=has_weights, need_tokenizer=False)
        model_config = read_config(checkpoint.config)
        if model_config.recurrent is not None:
            raise ConfigError(f"the draft model {path} has recurrent layers; use another one")
        if model_config.vocab_size != self.model_config.vocab_size:
            raise ConfigError(
                f"the draft model {path} has {model_config.vocab_size} token ids, but the target "
                f"has {self.model_config.vocab_size}; use a draft model with the same vocabulary"
            )
        return self._load(config, model_config, checkpoint, self.device.for_draft_model(config))

    def _agree(self, number: int) -> int:
        """Return the smallest number of blocks or states over all ranks."""
        smallest = self.group.smallest(number, self.device.torch_device)
        if smallest < number:
            text = "%d instead of %d, because another rank has no room for more"
            logger.info(f"KV cache and states: {text}", smallest, number)
        return smallest
