"""Executor: runs the plans of the engine core, in this process or in others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nanovllm.engine.step import IntColumn, Pending, StepPlan, StepResult

if TYPE_CHECKING:
    from nanovllm.engine.state_pool import StateCounts


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Properties of the workers, known once they have started."""

    num_blocks: int
    depth: int  # default pipeline depth of the device
    device: str  # "cpu" or "cuda"
    dtype: str
    device_name: str = "unknown"  # the vendor's product name
    states: StateCounts | None = None  # set if the model has recurrent layers


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    def start(self) -> ExecutorInfo:
        """Start the workers and load the model."""

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        """Launch a step. If it has masked rows, `sample` must be called to complete it."""

    def sample(self, masks: IntColumn) -> None:
        """Sample the plan submitted last, given the bitmasks of its masked rows."""

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        """Allocate host memory for bitmasks; do not change them until their step has finished."""

    def capture_one(self) -> bool:
        """Capture one CUDA graph while the engine is idle; return False if none is left."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""
