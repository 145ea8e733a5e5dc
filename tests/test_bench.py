"""`bench.py`, one workload for several engines, and how it splits the model of ours."""

from __future__ import annotations

import sys

import pytest

import bench
from nanovllm.cli.exit_code import exit_code
from tests.cli.terminal_process import run_program

WORKLOAD = ["--num-seqs", "2", "--max-input-len", "20", "--max-output-len", "8", "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [[], ["--tensor_parallel_size", "3"], ["--engine", "transformers"]], ids=" ".join
)
def test_every_engine_runs_the_workload(arguments: list[str]) -> None:
    result = run_program("bench.py", *WORKLOAD, *arguments, timeout=240)
    assert result.returncode == 0, result.stderr
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert names == ["engine", "prompts", "output", "speed", "first token", "peak memory"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--engine", "transformers", "--tensor-parallel-size", "2"],
            "bench.py: error: --engine transformers runs on one device, not on --tensor-parallel",
        ),
        (["--num-seqs", "-3"], "bench.py: error: argument --num-seqs: must be at least 1, got -3"),
        (["--num_seqs", "0"], "bench.py: error: argument --num-seqs: must be at least 1, got 0"),
        (["--max-output-len", "no"], "bench.py: error: argument --max-output-len: invalid integer"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *WORKLOAD, *arguments])
    try:
        code = exit_code(bench.main)
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert output.err.splitlines()[-1].startswith(message)
