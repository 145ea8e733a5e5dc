"""Run the largest possible step once, to compile its kernels and measure its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.config import EngineConfig
from nanovllm.engine.step import StepPlan
from nanovllm.worker.device_interface import Device
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.kv_cache import KVCacheSpec

if TYPE_CHECKING:
    from nanovllm.models.registry import Model


def profile_run(
    config: EngineConfig,
    device: Device,
    model: Model,
    spec: KVCacheSpec,
    attention: AttentionBackend,
) -> EagerForward:
    """Run a step of maximum size, whose rows share a few blocks; return the EagerForward used."""
    num_rows = min(config.max_num_rows, config.max_num_batched_tokens)
    row_len = min(-(-config.max_num_batched_tokens // num_rows), config.max_model_len)
    num_blocks = -(-row_len // spec.block_size)
    cache = device.allocate_cache(num_blocks * spec.block_bytes)
    input_batch = InputBatch(device, config.max_num_rows, config.max_model_len, spec.block_size)
    block_ids = torch.arange(num_blocks, device=device.torch_device)
    input_batch.block_table[:, :num_blocks] = block_ids
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
    eager = EagerForward(model, input_batch, attention, caches)
    device.sampler(input_batch, model.config.vocab_size)(eager(plan), plan)
    return eager
