"""Persistent tables by slot, so that a step's plan carries only what changed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, BatchRows, LayerCache
from nanovllm.engine.step import NewRow, StepPlan
from nanovllm.layers.build import ForwardBatch
from nanovllm.layers.sampler import SamplingColumns

INT32_MAX = 2**31 - 1


class InputBuffers:
    """Tokens, block table and sampling parameters of every slot; plans update it in order."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((num_slots, max_model_len), np.int32)
        self.block_table = np.zeros((num_slots, max_blocks), np.int32)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.int64)
        self._min_len: dict[int, tuple[int, list[int]]] = {}  # slot -> no stop token before, which

    def update(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self._min_len.pop(slot, None)
        for row in plan.new_rows:
            self._enter(row)
        for update in plan.block_updates:
            self.block_table[update.slot, update.index] = update.block_id

    def batch(
        self,
        plan: StepPlan,
        attention: AttentionBackend,
        dtype: torch.dtype,
        caches: list[LayerCache],
    ) -> ForwardBatch:
        ends = np.cumsum(plan.counts)
        is_decode = bool((plan.counts == 1).all() and plan.num_logits.all())
        row_ids = np.repeat(np.arange(len(plan.slots)), plan.counts)
        positions = np.arange(len(row_ids)) + (plan.starts - (ends - plan.counts))[row_ids]
        input_ids = self.tokens[plan.slots[row_ids], positions]
        rows = BatchRows(plan.starts, plan.counts, self.block_table[plan.slots])
        block_ids = rows.block_tables[row_ids, positions // self.block_size].astype(np.int64)
        kv_slots = block_ids * self.block_size + positions % self.block_size
        return ForwardBatch(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            kv_slots=torch.from_numpy(kv_slots),
            logits_index=None if is_decode else torch.from_numpy(ends[plan.num_logits > 0] - 1),
            attention=attention.plan(rows, dtype),
            caches=caches,
        )

    def sampling_columns(self, plan: StepPlan) -> SamplingColumns:
        """The parameters of the rows that are sampled, and the positions they sample for."""
        slots, positions = _sampled(plan)
        return SamplingColumns(
            temperature=torch.from_numpy(self.temperature[slots]),
            top_k=torch.from_numpy(self.top_k[slots]),
            top_p=torch.from_numpy(self.top_p[slots]),
            min_p=torch.from_numpy(self.min_p[slots]),
            seed=torch.from_numpy(self.seed[slots]),
            position=torch.from_numpy(positions.astype(np.int64)),
        )

    def mask_stop_tokens(self, logits: Tensor, plan: StepPlan) -> None:
        """Rule out every stop token in rows that have not reached their min_tokens."""
        if not self._min_len:
            return
        slots, positions = _sampled(plan)
        for row, (slot, position) in enumerate(
            zip(slots.tolist(), positions.tolist(), strict=True)
        ):
            min_len, stop_token_ids = self._min_len.get(slot, (0, []))
            if position < min_len:
                logits[row, stop_token_ids] = -torch.inf

    def append(self, plan: StepPlan, tokens: np.ndarray) -> None:
        """Store the sampled tokens where the next step reads them."""
        slots, positions = _sampled(plan)
        self.tokens[slots, positions] = tokens

    def _enter(self, row: NewRow) -> None:
        slot, params = row.slot, row.params
        self.tokens[slot, : len(row.token_ids)] = row.token_ids
        self.block_table[slot, : len(row.block_ids)] = row.block_ids
        self.temperature[slot] = params.temperature
        self.top_k[slot] = min(params.top_k, INT32_MAX)  # more than any vocabulary: no limit
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = row.seed
        self._min_len.pop(slot, None)
        if params.min_tokens and row.stop_token_ids:
            min_len = row.num_prompt_tokens + params.min_tokens
            self._min_len[slot] = (min_len, sorted(row.stop_token_ids))


def _sampled(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Slots of the sampled rows, and the position of the token each one samples."""
    is_sampled = plan.num_logits > 0
    return plan.slots[is_sampled], (plan.starts + plan.counts)[is_sampled]
