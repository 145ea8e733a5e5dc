"""Executor: runs the plans of the engine core, in this process or in others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nanovllm.engine.step import Bitmasks, IntColumn, Pending, StepPlan, StepResult

Windows = tuple[int | None, ...]  # one per group of layers; None: full attention


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Numbers of recurrent states.

    Order of the ids: slots, padding, initial (always zero), snapshots.
    """

    num_slots: int
    num_snapshots: int

    @property
    def initial_id(self) -> int:
        return self.num_slots + 1

    @property
    def snapshot_ids(self) -> range:
        return range(self.num_slots + 2, self.total)

    @property
    def total(self) -> int:
        return self.num_slots + 2 + self.num_snapshots


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Properties of the workers, known once they have started."""

    num_blocks: int
    depth: int  # default pipeline depth of the device
    device: str  # "cpu" or "cuda"
    dtype: str
    device_name: str = "unknown"  # the vendor's product name
    states: StateCounts | None = None  # set if the model has recurrent layers
    windows: Windows = (None,)


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    def start(self) -> ExecutorInfo:
        """Start the workers and load the model."""

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        """Launch a step. If it needs bitmasks, `sample` must be called to complete it."""

    def sample(self, bitmasks: Bitmasks) -> None:
        """Sample the plan submitted last, given its bitmasks."""

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        """Allocate host memory for bitmasks; do not change them until their step has finished."""

    def capture_one(self) -> bool:
        """Capture one CUDA graph while the engine is idle; return False if none is left."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""
