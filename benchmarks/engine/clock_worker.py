"""A worker without a model that reports when each plan has reached every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.ops.tp_group import TPGroup
from nanovllm.parallel.worker_main import WorkerTask, join_group


@dataclass(frozen=True, slots=True)
class Times:
    nanoseconds: list[int]

    def result(self) -> StepResult:
        return StepResult(np.array(self.nanoseconds, np.int64).view(np.int32))


@dataclass(frozen=True, slots=True)
class Clock:
    """Records when plans arrive, by the monotonic clock that all processes share.

    The result of a plan without rows is the arrival times of the plans since the last such plan,
    each on the slowest rank.
    """

    group: TPGroup
    arrivals: list[int] = field(default_factory=list)

    def start(self) -> ExecutorInfo:
        return ExecutorInfo(1, 1, "cpu", "none")

    def submit(self, plan: StepPlan) -> Times:
        if len(plan.slots):
            self.arrivals.append(time.monotonic_ns())
            return Times([])
        columns = self.group.gather_columns(torch.tensor(self.arrivals).unsqueeze(1))
        self.arrivals.clear()
        return Times(columns.max(dim=1).values.tolist())


def build_clock(task: WorkerTask, rank: int) -> Clock:
    return Clock(join_group(task, rank))
