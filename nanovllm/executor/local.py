"""One worker in this process."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import ExecutorInfo, StepPlan, StepResult
from nanovllm.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class Done:
    """A step whose tokens are here already."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class LocalExecutor:
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
    ) -> None:
        self._worker: Worker | None = Worker(config, model_config, checkpoint)

    def start(self) -> ExecutorInfo:
        assert self._worker is not None
        return self._worker.start()

    def submit(self, plan: StepPlan) -> Done:
        assert self._worker is not None, "submit after close"
        return Done(self._worker.run(plan))

    def close(self) -> None:
        self._worker = None
