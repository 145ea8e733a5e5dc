"""Marks for tests that need a CUDA device, or that run wherever there is a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm import LLM

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])


def runner_of(llm: LLM) -> Any:
    """The model runner: tests put something before or after its forward."""
    executor: Any = llm.engine.core.executor
    return executor._worker.runner


class RunAgain:
    """Graphs without a CUDA device: functions that run again, and write where they wrote before."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        output = run()

        def replay() -> None:
            output.copy_(run())

        return replay, output

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor
