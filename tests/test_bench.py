"""`bench.py`, one workload for several engines, and how it splits the model of ours."""

from __future__ import annotations

import subprocess

import pytest

from tests.cli.terminal_process import run_program

WORKLOAD = ["--num-seqs", "2", "--max-input-len", "20", "--max-output-len", "8", "--device", "cpu"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program("bench.py", *WORKLOAD, *arguments, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [[], ["--tensor_parallel_size", "3"], ["--engine", "transformers"]], ids=" ".join
)
def test_every_engine_runs_the_workload(arguments: list[str]) -> None:
    result = bench(*arguments)
    assert result.returncode == 0, result.stderr
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert names == ["engine", "prompts", "output", "speed", "first token", "peak memory"]


def test_transformers_cannot_be_split() -> None:
    result = bench("--engine", "transformers", "--tensor-parallel-size", "2")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--tensor-parallel-size" in result.stderr
