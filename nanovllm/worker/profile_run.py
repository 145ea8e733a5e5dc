"""Run the largest possible step once, to compile its kernels and measure its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.step import StepPlan
from nanovllm.ops.torch_delta_net import CHUNK_SIZE
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from nanovllm.worker.load_model import LoadedModel


def profile_run(
    config: EngineConfig, loaded: LoadedModel, profiles: Sequence[Callable[[], None]]
) -> EagerForward:
    """Run a step of maximum size, whose rows share a few blocks; return the EagerForward.

    Also run the work of `profiles`, which never runs at the same time as a step.
    """
    for profile in profiles:
        profile()
    device, spec, num_slots = loaded.device, loaded.spec, loaded.num_slots
    counts = largest_counts(config, num_slots, loaded.model.config.recurrent is not None)
    num_rows = len(counts)
    num_blocks = -(-int(counts.max()) // spec.block_size)
    cache = device.allocate_cache(num_blocks * spec.block_bytes)
    sizes = num_slots, config.max_model_len, spec.block_size
    input_batch = InputBatch(device, *sizes, spec.groups.id_factors)
    block_ids = torch.arange(num_blocks, device=device.torch_device)
    for group, factor in enumerate(spec.groups.id_factors):
        input_batch.block_tables[:, group, :num_blocks] = factor * block_ids
    column = np.ones(num_rows, np.int32)
    plan = StepPlan(
        slots=np.arange(num_rows, dtype=np.int32),
        starts=0 * column,
        counts=counts,
        num_logits=column,
        new_rows=[],
        block_updates=[],
        released=[],
        num_decode_tokens=0,
    )
    eager = loaded.eager(cache, num_blocks, input_batch)
    device.sampler(input_batch, eager.model.config.vocab_size)(eager(plan), plan)
    return eager


def largest_counts(config: EngineConfig, num_slots: int, is_recurrent: bool) -> np.ndarray:
    """Return the number of tokens of each row in the step that needs the most memory."""
    num_tokens = config.max_num_batched_tokens
    num_rows = min(num_slots, num_tokens)
    counts = np.full(num_rows, -(-num_tokens // num_rows))
    if is_recurrent:
        # Memory grows with the number of DeltaNet chunks, so most rows end with a one-token chunk.
        num_rows = min(num_slots, max(num_tokens - CHUNK_SIZE, 1))
        rows = np.arange((num_tokens - num_rows) // CHUNK_SIZE) % num_rows
        counts = 1 + CHUNK_SIZE * np.bincount(rows, minlength=num_rows)
        counts[0] += num_tokens - counts.sum()
    return np.minimum(counts, config.max_model_len).astype(np.int32)
