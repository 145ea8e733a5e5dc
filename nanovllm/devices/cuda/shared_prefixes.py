"""Find decode rows with a common prefix, whose keys are then read only once (cascade attention).

Sequences share the KV-cache blocks that they got from the prefix cache when they were admitted.
Rows are grouped by their first block; a group shares the leading blocks that all its rows have in
common. All layers with full attention share alike, so the blocks of one of their groups tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.attention.backend import SharedRows
from nanovllm.engine.step import IntColumn, NewRow

if TYPE_CHECKING:
    from nanovllm.devices.cuda.device import CudaDevice

NUM_GROUPS = 4  # maximum number of groups: the largest ones are used
MIN_ROWS = 32  # smaller batches have no graph for shared prefixes
MIN_SAVED = 1 << 15  # minimum key reads to save: fewer are not worth an extra kernel per layer
NO_BLOCK = -1


class SharedPrefixes:
    """Tracks the blocks that each sequence was admitted with, and holds the kernels' tables."""

    def __init__(
        self,
        device: CudaDevice,
        num_slots: int,
        max_blocks: int,
        block_size: int,
        layer_group: int,  # a group of layers with full attention
    ) -> None:
        self.device = device
        self.block_size = block_size
        self._layer_group = layer_group
        self._blocks = np.full((num_slots, max_blocks), NO_BLOCK, np.int32)
        self._slots: IntColumn | None = None  # slots of the last batch passed to `find`
        self._is_worth_it = False
        self._tables = torch.zeros(
            4 * NUM_GROUPS + 2 * num_slots, dtype=torch.int32, device=device.torch_device
        )

    def enter(self, new_rows: list[NewRow]) -> None:
        for row in new_rows:
            self._blocks[row.slot] = NO_BLOCK
            block_ids = row.tables[self._layer_group]
            self._blocks[row.slot, : len(block_ids)] = block_ids
        if new_rows:
            self._slots = None

    def find(self, slots: IntColumn) -> bool:
        """Return whether sharing pays off for these slots; if so, fill the tables."""
        if self._slots is None or not np.array_equal(slots, self._slots):
            self._slots = slots
            groups, members, lens = find_groups(self._blocks, slots, self.block_size)
            saved = int((groups[1] * (groups[3] - 1)).sum())
            self._is_worth_it = saved >= MIN_SAVED
            if self._is_worth_it:
                padding = np.zeros(len(self._blocks) - len(slots), np.int32)
                columns = groups.ravel(), members, padding, lens, padding
                self.device.send(np.concatenate(columns), self._tables)
        return self._is_worth_it

    def clear(self) -> None:
        """Forget the last batch before a capture: its rows may not exist in a smaller graph."""
        self._slots = None
        self._tables.zero_()

    def rows(self, size: int) -> SharedRows:
        """Return the tables that a graph of this batch size reads."""
        groups, tables = self._tables[: 4 * NUM_GROUPS], self._tables[4 * NUM_GROUPS :]
        members, lens = tables.view(2, -1)[:, :size]
        return SharedRows(groups.view(4, NUM_GROUPS), members, lens)


def find_groups(
    blocks: IntColumn, slots: IntColumn, block_size: int
) -> tuple[IntColumn, IntColumn, IntColumn]:
    """Group rows that begin with the same blocks; `blocks` [slots, max_blocks] is indexed by slot.

    Return the columns of SharedRows: groups, members, and the number of shared keys of each row.
    """
    groups = np.zeros((4, NUM_GROUPS), np.int32)
    members, lens = np.zeros((2, len(slots)), np.int32)
    _, owners, counts = np.unique(blocks[slots, 0], return_inverse=True, return_counts=True)
    end = 0
    for i, group in enumerate(np.argsort(-counts, kind="stable")[:NUM_GROUPS]):
        if counts[group] == 1:
            break
        rows = np.flatnonzero(owners == group)
        leader = blocks[slots[rows[0]]]
        leader = leader[leader != NO_BLOCK]
        is_common = (blocks[slots[rows], : len(leader)] == leader).all(0)
        num_keys = int(is_common.cumprod().sum()) * block_size
        groups[:, i] = slots[rows[0]], num_keys, end, len(rows)
        members[end : end + len(rows)] = rows
        lens[rows] = num_keys
        end += len(rows)
    return groups, members, lens
