"""One worker in this process."""

from __future__ import annotations

from nanovllm.engine.step import ExecutorInfo, IntColumn, StepPlan, StepResult
from nanovllm.pending import Pending
from nanovllm.worker.worker import Worker


class LocalExecutor:
    def __init__(self, worker: Worker) -> None:
        self.worker: Worker | None = worker  # None: closed

    def start(self) -> ExecutorInfo:
        assert self.worker is not None
        return self.worker.start()

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        assert self.worker is not None, "submit after close"
        return self.worker.run(plan)

    def sample(self, masks: IntColumn) -> None:
        assert self.worker is not None, "sample after close"
        self.worker.sample(masks)

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        assert self.worker is not None, "mask_memory after close"
        return self.worker.device.host_memory((num_rows, num_words))

    def capture_one(self) -> bool:
        assert self.worker is not None, "capture_one after close"
        return self.worker.capture_one()

    def close(self) -> None:
        if self.worker is not None:
            device, self.worker = self.worker.device, None
            device.release()
