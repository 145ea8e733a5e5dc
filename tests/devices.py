"""Marks for tests that need a CUDA device, or that run wherever there is a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
