"""One worker in this process."""

from __future__ import annotations

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import ExecutorInfo, StepPlan
from nanovllm.executor.base import Pending
from nanovllm.worker.worker import Worker


class LocalExecutor:
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
    ) -> None:
        self._worker: Worker | None = Worker(config, model_config, checkpoint)

    def start(self) -> ExecutorInfo:
        assert self._worker is not None
        return self._worker.start()

    def submit(self, plan: StepPlan) -> Pending:
        assert self._worker is not None, "submit after close"
        return self._worker.run(plan)

    def close(self) -> None:
        if self._worker is not None:
            platform, self._worker = self._worker.platform, None
            platform.release()
