"""Persistent tables by slot on the device, so that a step's plan carries only what changed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, BatchRows, LayerCache
from nanovllm.engine.step import NewRow, StepPlan
from nanovllm.kernels.ops import SamplingVariant
from nanovllm.layers.build import ForwardBatch, SampledTokens
from nanovllm.platforms.base import Platform
from nanovllm.sampling_params import SamplingParams

INT32_MAX = 2**31 - 1

VARIANTS: tuple[SamplingVariant, ...] = ("greedy", "plain", "min_p", "full")


class InputBuffers:
    """Tokens, block table and sampling parameters of every slot; plans update it in order.

    All tables are parts of one int32 tensor: an update is one list of places and one of values.
    The line after the last slot belongs to the rows that pad a batch; its length stays 0.
    """

    def __init__(
        self, platform: Platform, num_slots: int, max_model_len: int, block_size: int
    ) -> None:
        self.platform = platform
        self.num_slots = num_slots
        self.block_size = block_size
        num_lines = num_slots + 1
        max_blocks = -(-max_model_len // block_size)
        sizes = (max_model_len, max_blocks, 1, 1, 1, 1, 1, 2)
        ends = np.cumsum([0, *(num_lines * (size + size % 2) for size in sizes)]).tolist()
        self._state = torch.zeros(ends[-1], dtype=torch.int32, device=platform.device)
        self._places = ends
        tables = [
            self._state[begin:][: num_lines * size].view(num_lines, size)
            for begin, size in zip(ends, sizes, strict=False)
        ]
        self.tokens, self.block_table = tables[:2]
        self.lengths, self.top_k = tables[2].squeeze(1), tables[3].squeeze(1)
        temperature, top_p, min_p = (table.view(torch.float32) for table in tables[4:7])
        self.temperature, self.top_p, self.min_p = (
            table.squeeze(1) for table in (temperature, top_p, min_p)
        )
        self.seed = tables[7].view(torch.int64).squeeze(1)
        self._variants = np.zeros(num_slots, np.int8)  # on the host: index into VARIANTS
        self._min_len: dict[int, tuple[int, list[int]]] = {}  # slot -> no stop token before, which

    def update(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self._min_len.pop(slot, None)
        changes = [change for row in plan.new_rows for change in self._enter(row)]
        if plan.block_updates:
            updates = plan.block_updates
            width = self.block_table.shape[1]
            entries = [self._places[1] + u.slot * width + u.index for u in updates]
            changes.append((np.array(entries), np.array([u.block_id for u in updates], np.int32)))
        if changes:
            places, values = (np.concatenate(column) for column in zip(*changes, strict=True))
            self._state[self.platform.upload(places)] = self.platform.upload(values)

    def batch(
        self,
        plan: StepPlan,
        attention: AttentionBackend,
        dtype: torch.dtype,
        caches: list[LayerCache],
    ) -> ForwardBatch:
        ends = np.cumsum(plan.counts)
        upload = self.platform.upload
        slots, positions = (upload(column) for column in tokens_of(plan))
        input_ids, kv_slots = self.look_up(slots, positions)
        rows = BatchRows(plan.slots, plan.starts, plan.counts, self.block_table)
        sampled = None
        if not is_decode(plan):
            is_sampled = plan.num_logits > 0
            last_tokens = rows.last_tokens(is_sampled)
            sampled = SampledTokens(
                upload(ends[is_sampled] - 1), attention.plan(last_tokens, dtype)
            )
        return ForwardBatch(
            input_ids, positions, kv_slots, sampled, attention.plan(rows, dtype), caches
        )

    def look_up(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens at some positions, and where in the cache their keys go."""
        block_ids = self.block_table[slots, positions // self.block_size].long()
        kv_slots = block_ids * self.block_size + positions % self.block_size
        return self.tokens[slots, positions], kv_slots

    def mask_stop_tokens(self, logits: Tensor, plan: StepPlan) -> None:
        """Rule out every stop token in rows that have not reached their min_tokens."""
        if not self._min_len:
            return
        slots, positions = (column.tolist() for column in sampled_rows(plan))
        places = []  # in the logits, all rows in one line
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            min_len, stop_token_ids = self._min_len.get(slot, (0, []))
            if position < min_len:
                places += [row * logits.shape[1] + token_id for token_id in stop_token_ids]
            elif min_len:
                del self._min_len[slot]
        if places:
            masked = self.platform.upload(np.array(places))
            logits.view(-1).index_fill_(0, masked, -torch.inf)  # setting items would wait

    def sampling_variant(self, plan: StepPlan) -> SamplingVariant:
        """The least general way of sampling that serves every sampled row."""
        return VARIANTS[int(self._variants[plan.slots[plan.num_logits > 0]].max(initial=0))]

    def _enter(self, row: NewRow) -> list[tuple[np.ndarray, np.ndarray]]:
        """Note a sequence's arrival; return what changes in the tables, as places and values."""
        slot, params = row.slot, row.params
        self._variants[slot] = VARIANTS.index(_variant(params))
        self._min_len.pop(slot, None)
        if params.min_tokens and row.stop_token_ids:
            min_len = row.num_prompt_tokens + params.min_tokens
            self._min_len[slot] = (min_len, sorted(row.stop_token_ids))
        columns = (
            np.asarray(row.token_ids, np.int32),
            np.array(row.block_ids, np.int32),
            np.array([len(row.token_ids)], np.int32),
            np.array([min(params.top_k, INT32_MAX)], np.int32),  # 2**31 - 1: no limit
            *(
                np.array([value], np.float32).view(np.int32)
                for value in (params.temperature, params.top_p, params.min_p)
            ),
            np.array([row.seed], np.int64).view(np.int32),
        )
        widths = (self.tokens.shape[1], self.block_table.shape[1], 1, 1, 1, 1, 1, 2)
        return [
            (begin + slot * width + np.arange(len(values)), values)
            for begin, width, values in zip(self._places, widths, columns, strict=False)
        ]


def _variant(params: SamplingParams) -> SamplingVariant:
    if params.temperature == 0:
        return "greedy"
    if params.top_k or params.top_p < 1:
        return "full"
    return "min_p" if params.min_p else "plain"


def sampled_rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Slots of the sampled rows, and the position of the token each one samples."""
    is_sampled = plan.num_logits > 0
    return plan.slots[is_sampled], (plan.starts + plan.counts)[is_sampled]


def is_decode(plan: StepPlan) -> bool:
    """Whether every row runs one token and samples the next."""
    return bool((plan.counts == 1).all() and plan.num_logits.all())


def tokens_of(plan: StepPlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Slot and position of every token that a step runs."""
    row_ids = np.repeat(np.arange(len(plan.slots)), plan.counts)
    firsts = plan.starts - (np.cumsum(plan.counts) - plan.counts)
    return plan.slots[row_ids].astype(np.int64), np.arange(len(row_ids)) + firsts[row_ids]
