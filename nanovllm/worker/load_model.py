"""Build a model on one device, and load its weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.attention.backend import AttentionBackend
from nanovllm.checkpoint.dense_layers import load_dense
from nanovllm.checkpoint.find import Checkpoint, stores_quantized
from nanovllm.checkpoint.own_head import has_own_head
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import build_model, fallback
from nanovllm.ops.interface import LayerCache, LayerState
from nanovllm.worker.device_interface import Device
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.kv_cache import KVCacheSpec, kv_cache_spec
from nanovllm.worker.loader import load_weights
from nanovllm.worker.memory_needs import MemoryNeeds, check_memory
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.profile_run import profile_run
from nanovllm.worker.quantized_layouts import choose_layouts
from nanovllm.worker.state_cache import StateCache, create_state_cache

if TYPE_CHECKING:
    from nanovllm.models.registry import Model, TransformersModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    spec: KVCacheSpec
    attention: AttentionBackend
    device: Device
    state_cache: StateCache | None  # set if the model has recurrent layers
    num_slots: int  # of the InputBatch
    needs: MemoryNeeds

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


def load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    device: Device,
    target: ModelConfig | None = None,
) -> LoadedModel:
    """Build a model, load its weights and compile its kernels.

    `target` is set for a draft model, which shares the target's InputBatch.
    """
    is_tied = model_config.tie_word_embeddings and model_config.transformers_config is None
    has_weights = checkpoint.embedding is None and config.load_format != "dummy"
    if is_tied and has_weights and has_own_head(checkpoint):
        logger.info("lm_head.weight differs from the embedding: the two are not tied")
        model_config = replace(model_config, tie_word_embeddings=False)
    is_quantized = stores_quantized(checkpoint.config)
    dtype = device.choose_dtype(config.dtype, model_config.dtype, is_quantized)
    ops = device.ops(dtype)
    attention = device.attention(dtype, ops)
    layouts = None
    if config.quantization is not None or is_quantized:
        layouts = choose_layouts(config, checkpoint, device, dtype)
    build = BuildContext(device.torch_device, dtype, attention, ops, device.group, layouts)
    needs = check_memory(config, model_config, device, build, target)
    device.group.smallest(0, device.torch_device)  # barrier: no rank loads before all have checked
    model = _load_weights(config, model_config, checkpoint, device, build)
    if checkpoint.embedding is not None and config.load_format != "dummy":
        folders = checkpoint.embedding.dense
        model.dense.extend(load_dense(folders, model_config.hidden_size, build.device))
    spec = kv_cache_spec(config, model_config, dtype, device.group, target)
    state_cache, num_slots = None, config.max_num_rows
    # Create the states before `prepare`: the profile run needs them.
    if model_config.recurrent is not None:
        budget = device.cache_budget(needs)
        recurrent = model_config.recurrent
        state_cache = create_state_cache(config, recurrent, dtype, spec, device, budget)
        num_slots = state_cache.counts.num_slots
    loaded = LoadedModel(model, spec, attention, device, state_cache, num_slots, needs)
    needs = device.prepare(loaded, partial(profile_run, config, loaded))
    return replace(loaded, needs=needs)


def _load_weights(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    device: Device,
    build: BuildContext,
) -> Model:
    is_dummy = config.load_format == "dummy"
    if model_config.transformers_config is not None:
        source = None if is_dummy else checkpoint
        loaded: TransformersModel = fallback().load_model(model_config, source, config.seed, build)
        loaded.pack_linears(device.has_room_for_copy(loaded.num_bytes))
        device.release()
        return loaded
    model = build_model(model_config, config.max_model_len, build)
    if is_dummy:
        from nanovllm.worker.dummy_weights import fill_dummy_weights

        fill_dummy_weights(model, device, config.seed)
    else:
        load_weights(model, checkpoint, device, show_progress=device.group.rank == 0)
    return model
