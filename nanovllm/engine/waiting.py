"""The sequences that wait to run, the next one first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from nanovllm.engine.sequence import Sequence


class Waiting:
    """By priority, the lowest number first; among equals the preempted first, then as they came."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, Sequence]] = {}  # by priority, none empty
        self._priorities: list[int] = []  # the keys, in order
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            yield from self._queues[priority].values()

    def add(self, seq: Sequence, is_first: bool = False) -> None:
        """Put a sequence behind those of its priority, or before them."""
        if seq.priority not in self._queues:
            self._queues[seq.priority] = OrderedDict()
            insort(self._priorities, seq.priority)
        queue = self._queues[seq.priority]
        queue[seq.seq_id] = seq
        if is_first:
            queue.move_to_end(seq.seq_id, last=False)
        self._num_waiting += 1

    def first(self) -> Sequence:
        return next(iter(self._queues[self._priorities[0]].values()))

    def remove(self, seq: Sequence) -> None:
        queue = self._queues[seq.priority]
        del queue[seq.seq_id]
        if not queue:
            del self._queues[seq.priority]
            del self._priorities[bisect_left(self._priorities, seq.priority)]
        self._num_waiting -= 1
