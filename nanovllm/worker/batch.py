"""From a plan to the tensors that a model reads: all rows' tokens, one after another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, BatchRows
from nanovllm.engine.step import StepPlan
from nanovllm.kernels.ops import LayerCache
from nanovllm.layers.build import ForwardBatch, SampledTokens
from nanovllm.worker.tables import SlotTables


def make_batch(
    plan: StepPlan, tables: SlotTables, attention: AttentionBackend, caches: list[LayerCache]
) -> ForwardBatch:
    upload = tables.device.upload
    slots, positions = (upload(column) for column in tokens_of(plan))
    input_ids, cache_offsets = look_up(tables, slots, positions)
    rows = BatchRows(plan.slots, plan.starts, plan.counts, tables.block_table)
    sampled = None
    if not is_decode(plan):
        is_sampled = plan.num_logits > 0
        last_tokens = np.cumsum(plan.counts)[is_sampled] - 1
        last_rows = attention.plan(rows.last_tokens(is_sampled))
        sampled = SampledTokens(upload(last_tokens), last_rows)
    planned = attention.plan(rows)
    return ForwardBatch(input_ids, positions, cache_offsets, sampled, planned, caches)


def look_up(tables: SlotTables, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens at some positions, and where in the cache their keys go."""
    block_ids = tables.block_table[slots, positions // tables.block_size].long()
    cache_offsets = block_ids * tables.block_size + positions % tables.block_size
    return tables.tokens[slots, positions], cache_offsets


def tokens_of(plan: StepPlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Slot and position of every token that a step runs."""
    row_ids = np.repeat(np.arange(len(plan.slots)), plan.counts)
    firsts = plan.starts - (np.cumsum(plan.counts) - plan.counts)
    return plan.slots[row_ids].astype(np.int64), np.arange(len(row_ids)) + firsts[row_ids]


def sampled_rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Slots of the sampled rows, and the position of the token each one samples."""
    is_sampled = plan.num_logits > 0
    return plan.slots[is_sampled], (plan.starts + plan.counts)[is_sampled]


def is_decode(plan: StepPlan) -> bool:
    """Whether every row runs one token and samples the next."""
    return bool((plan.counts == 1).all() and plan.num_logits.all())
