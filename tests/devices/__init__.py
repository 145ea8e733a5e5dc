"""Marks for tests that need a CUDA device, and ways to run without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cuda.graph_pool import Graph

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])


def run_interpreted(*arguments: str) -> str:
    """Run modules, joined by commas, in Triton's interpreter; return what they printed.

    They run in a new process, because TRITON_INTERPRET must be set before Triton is imported.
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.interpreted", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def cpu_device(**options: Any) -> CpuDevice:
    return CpuDevice(EngineConfig("none", **options))


def runner_of(llm: LLM) -> Any:
    """Return the model runner of an engine; tests wrap its `forward`."""
    executor: Any = llm.engine.core.executor
    return executor.runner


class FunctionPool:
    """Stand-in for a GraphPool on a CPU: a replay runs the function again, into the same output."""

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        output = run()

        def replay() -> None:
            output.copy_(run())

        return Graph(replay, output)


class RunAgain:
    """The parts of CudaDevice that graphs need, for a CPU device."""

    graph_pool = FunctionPool()

    def send(self, array: np.ndarray, target: Tensor) -> None:
        target[: len(array)].copy_(torch.from_numpy(array))

    def pinned(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def is_pinned(self, array: np.ndarray) -> bool:
        return True
