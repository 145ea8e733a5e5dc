"""InputBatch: the state of every slot, kept on the device, so that plans carry only changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.step import NewRow, StepPlan
from nanovllm.ops.interface import Sampling
from nanovllm.ops.torch_sampling import SamplingColumns
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.device_interface import Device
from nanovllm.worker.draft_rows import draft_changes

INT32_MAX = 2**31 - 1
Numbers = TypeVar("Numbers", int, np.ndarray)
ALIGNMENT = 4  # in words: kernels read a column faster if it begins at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class SlotField:
    """A column of the InputBatch."""

    dtype: type[np.number[Any]]
    # Computes a slot's entry when a sequence enters it; None: the column has `width` entries.
    value: Callable[[NewRow], Any] | None
    width: int = 1

    @property
    def num_words(self) -> int:
        """Number of 32-bit words per slot."""
        return self.width * np.dtype(self.dtype).itemsize // 4


def slot_fields(max_model_len: int, block_size: int, num_groups: int) -> dict[str, SlotField]:
    max_blocks = -(-max_model_len // block_size)
    return {
        "tokens": SlotField(np.int32, None, max_model_len),
        "block_tables": SlotField(np.int32, None, num_groups * max_blocks),
        "lengths": SlotField(np.int32, lambda row: len(row.token_ids)),
        "temperature": SlotField(np.float32, lambda row: row.params.temperature),
        "top_k": SlotField(np.int32, lambda row: min(row.params.top_k, INT32_MAX)),
        "top_p": SlotField(np.float32, lambda row: row.params.top_p),
        "min_p": SlotField(np.float32, lambda row: row.params.min_p),
        "seed": SlotField(np.int64, lambda row: row.seed),
        "prompt_lens": SlotField(np.int32, lambda row: row.num_prompt_tokens),
        "presence": SlotField(np.float32, lambda row: row.params.presence_penalty),
        "frequency": SlotField(np.float32, lambda row: row.params.frequency_penalty),
        "repetition": SlotField(np.float32, lambda row: row.params.repetition_penalty),
        "rope_offsets": SlotField(np.int32, lambda row: sum(i.rope_offset for i in row.images)),
    }


class InputBatch:
    """The state of all slots: a column for each field, with a row for each slot.

    All columns are views of one tensor, so an update is a list of offsets and a list of values. The
    row after the last slot is used for the padding of batches; its length stays 0.
    """

    tokens: Tensor  # [slots + 1, max_model_len]
    block_tables: Tensor  # [slots + 1, groups, max_blocks]
    lengths: Tensor  # [slots + 1], as are all columns below
    prompt_lens: Tensor
    presence: Tensor  # penalty
    frequency: Tensor  # penalty
    repetition: Tensor  # penalty
    rope_offsets: Tensor  # added to positions for rotations, behind the images of a prompt
    sampling_columns: SamplingColumns

    def __init__(
        self,
        device: Device,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        id_factors: tuple[int, ...] = (1,),
    ) -> None:
        # For each group, what multiplies its block ids.
        self._id_factors = np.array(id_factors, np.int32)
        num_groups = len(id_factors)
        self.device = device
        self.num_slots = num_slots
        self.block_size = block_size
        self._columns = slot_fields(max_model_len, block_size, num_groups)
        self._offsets, end = {}, 0
        for name, column in self._columns.items():
            self._offsets[name] = end
            end += -(-(num_slots + 1) * column.num_words // ALIGNMENT) * ALIGNMENT
        self.words = torch.zeros(end, dtype=torch.int32, device=device.torch_device)
        for name in self._columns:
            setattr(self, name, self._view(name))
        self.block_tables = self.block_tables.view(num_slots + 1, num_groups, -1)
        self.sampling_columns = SamplingColumns(*map(self._view, SamplingColumns.__slots__))
        single = {
            name: column for name, column in self._columns.items() if column.value is not None
        }
        self._record = np.dtype([(name, column.dtype) for name, column in single.items()])
        # A record holds a slot's values of all columns that have one value per slot. For each word
        # of a record, compute its offset in slot 0 and the stride between slots.
        self._first_words, self._slot_words = np.array(
            [
                (self._offsets[name] + word, column.num_words)
                for name, column in single.items()
                for word in range(column.num_words)
            ]
        ).T
        self._sampling = np.zeros(num_slots, np.int32)  # Sampling flags of each slot, on the host

    def update(self, plan: StepPlan) -> None:
        """Apply a plan's changes.

        Call this after the previous step is launched, and before the step of this plan.
        """
        changes = self.changes(plan)
        if len(changes):
            offsets, values = self.device.upload(np.array(changes.T, np.int64, order="C"))
            self.words.scatter_(0, offsets, values.view(torch.int32)[::2])  # low halves of int64

    def changes(self, plan: StepPlan) -> np.ndarray:
        """Return a plan's changes, [changes, 2]: the offset of each word, and its new value."""
        changes = [change for row in plan.new_rows for change in self._enter(row)]
        if plan.block_updates:
            slots, entries, block_ids, groups = np.array(plan.block_updates, np.int32).T
            offsets = self._table_offsets(slots, groups) + entries
            changes.append((offsets, self._id_factors[groups] * block_ids))
        for update in plan.draft_updates:
            first = self._offsets["tokens"] + update.slot * self.tokens.shape[1]
            changes.append(draft_changes(update, first, self._offsets["lengths"] + update.slot))
        if not changes:
            return np.empty((0, 2), np.int32)
        offsets, values = (np.concatenate(part) for part in zip(*changes, strict=True))
        return np.stack((offsets, values), 1, dtype=np.int32, casting="same_kind")

    def sampling(self, plan: StepPlan) -> Sampling:
        """Return the union of the sampling features that the sampled rows need."""
        return Sampling(int(np.bitwise_or.reduce(self._sampling[plan.slots[plan.num_logits > 0]])))

    def _view(self, name: str) -> Tensor:
        column = self._columns[name]
        words = self.words[self._offsets[name] :][: (self.num_slots + 1) * column.num_words]
        dtype = getattr(torch, np.dtype(column.dtype).name)
        table = words.view(dtype)
        return table if column.value is not None else table.view(self.num_slots + 1, column.width)

    def _enter(self, row: NewRow) -> list[tuple[np.ndarray, np.ndarray]]:
        """Record a new row's sampling features; return its changes as pairs (offsets, values)."""
        self._sampling[row.slot] = sampling_of(row.params)
        values = [column.value(row) for column in self._columns.values() if column.value]
        words = np.array([tuple(values)], self._record).view(np.int32)
        changes = [(self._first_words + row.slot * self._slot_words, words)]
        first = self._offsets["tokens"] + row.slot * self.tokens.shape[1]
        changes.append((np.arange(first, first + len(row.token_ids)), row.token_ids))
        for group, block_ids in enumerate(row.tables):
            offsets = self._table_offsets(row.slot, group) + np.arange(len(block_ids))
            changes.append((offsets, self._id_factors[group] * np.array(block_ids, np.int32)))
        return changes

    def _table_offsets(self, slots: Numbers, groups: Numbers) -> Numbers:
        """Return the offsets of the block tables of groups."""
        by_slot, by_group, _ = self.block_tables.stride()
        return self._offsets["block_tables"] + slots * by_slot + groups * by_group


def sampling_of(params: SamplingParams) -> Sampling:
    """Return the sampling features that a request needs."""
    if params.temperature == 0:
        return Sampling.GREEDY
    features = Sampling.RANDOM
    if params.min_p:
        features |= Sampling.MIN_P
    if params.top_k or params.top_p < 1:
        features |= Sampling.TOP_K_TOP_P
    return features
