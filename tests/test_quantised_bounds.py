"""What quantised models may lose in quality and take in memory, on a CPU: bounds of benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from benchmarks.engine import quality
from benchmarks.engine.loading import GB
from benchmarks.engine.loading_quantised import load_one

needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's /proc")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "names"),
    [("bfloat16", ["as stored", "fp8 KV", "fp8 weights"]), ("float32", ["as stored"])],
)
def test_perplexity_of_the_built_in_model(dtype: str, names: list[str]) -> None:
    found = quality.measure("smollm2", dtype, names)
    for name in names:
        other, limit = quality.CASES[name]
        assert abs(found[name] / found[other] - 1) <= limit, name


@needs_proc
def test_loading_blocks_holds_no_second_copy(tmp_path: Path) -> None:
    load = load_one(tmp_path, "gguf", gigabytes=0.5)
    assert load.file_bytes > 0.15 * GB
    assert load.peak_bytes - load.held_bytes <= 1.1 * load.file_bytes + 0.1 * GB


@needs_proc
@pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA's libraries take more")
def test_the_built_in_model_is_served_in_700_megabytes() -> None:
    command = [sys.executable, "-m", "benchmarks.engine.resident_memory", "--requests", "4"]
    subprocess.run(command, check=True)
