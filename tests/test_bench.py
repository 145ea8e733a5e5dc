"""`bench.py`: several engines run the same workloads and are measured in the same way."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

import bench
from benchmarks.engines import shared_options
from benchmarks.workloads import Workload
from nanovllm.cli.exit_code import exit_code
from tests.bench.test_steps import CONFIG

WORKLOAD = ["--num-seqs", "2", "--max-input-len", "20", "--max-output-len", "8", "--device", "cpu"]


@pytest.mark.slow
def test_engines_run_the_same_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model in float32: with emulated bfloat16, transformers would take minutes."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    results = tmp_path / "results.jsonl"
    engines = ["nanovllm-transformers", "transformers"]
    options = ["--model", str(tmp_path), "--load-format", "dummy", "--engine", *engines]
    options += ["--case", "mixed", "2x16x1", "1x16x4", "--repeats", "1", "--json", str(results)]
    monkeypatch.setattr(sys, "argv", ["bench.py", *WORKLOAD, *options])
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert bench.main() == 0
    rows = [line.split(" | ")[0] for line in shown.getvalue().splitlines()[2:6]]
    units = {"nano-2-20-8": "tok/s", "2x16x1": "prompt tok/s", "1x16x4": "ms/step, whole run"}
    labels = [f"{case}, {unit}" for case, unit in units.items()]
    assert rows == [f"| {label}" for label in [*labels, "peak memory, GB"]]
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(record["engine"], record["case"], record["unit"]) for record in records] == [
        (name, case, unit) for name in engines for case, unit in units.items()
    ]
    assert {record["dtype"] for record in records} == {"float32"}


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *WORKLOAD, "--tensor_parallel_size", "3"])
    assert shared_options(bench.parse_args(), [Workload([[1, 2]], [5])]) == {
        "dtype": "auto",
        "load_format": "auto",
        "tensor_parallel_size": 3,
        "skip_tokenizer_init": True,
        "max_model_len": 7,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--engine", "transformers", "--tensor-parallel-size", "2"],
            "bench.py: error: --engine transformers runs on one device; drop --tensor-parallel",
        ),
        (["--num-seqs", "-3"], "bench.py: error: argument --num-seqs: must be at least 1, got -3"),
        (["--num_seqs", "0"], "bench.py: error: argument --num-seqs: must be at least 1, got 0"),
        (
            ["--case", "bs1", "8x8"],
            "bench.py: error: --case 8x8 is neither one of mixed, first, bs1",
        ),
        (["--engine", "vllm"], "bench.py: error: --engine vllm needs vLLM: pip install vllm"),
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
