"""benchmarks/report/gpu_report.py: which parts run, in which processes, and for how long."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.report.gpu_report import (
    OWN_PROCESS,
    PARTS,
    bench_options,
    command,
    groups,
    run_limited,
    run_processes,
    select,
    table,
)
from nanovllm.errors import ConfigError
from tests.bench.test_commands import CONFIG
from tests.bench.test_scripts import script

OPTIONS = argparse.Namespace(json="r.jsonl", repeats=3, quick=False, model=None, max_seconds=0.0)


def test_parts_are_selected_by_name_or_pattern() -> None:
    assert select(PARTS, None) == list(PARTS)
    names = [part.name for part in select(PARTS, "*-8b,nano-0.6b")]
    assert names == ["nano-0.6b", "nano-8b", "bs1-8b", "bs64-8b"]
    with pytest.raises(ConfigError, match=r"--only bs2: there is no such part, only nano-0.6b, "):
        select(PARTS, "nano-8b,bs2")


def test_parts_of_one_model_share_an_engine_and_starts_have_their_own() -> None:
    small, large, sparse, starts, comparison = groups(list(PARTS))
    assert small[0].name == "nano-0.6b"
    assert {part.model for part in large} == {"qwen3-8b"}
    assert {part.model for part in sparse} == {"qwen3-30b-a3b"}
    assert [part.name for part in starts] == ["startup-0.6b"]
    assert [part.name for part in comparison] == ["compare-0.6b"]
    arguments = command(large, OPTIONS)[2:]
    assert arguments[:4] == [
        "benchmarks.report.gpu_report",
        "--here",
        "--only",
        "nano-8b,bs1-8b,bs64-8b",
    ]
    assert command(starts, OPTIONS)[2:] == [
        *("benchmarks.engine.startup", "--model", "qwen3-0.6b"),
        *("--json", "r.jsonl"),
    ]


def test_every_part_is_a_command_of_the_usual_case() -> None:
    for part in PARTS:
        if part.script not in ("trace", *OWN_PROCESS):
            options = bench_options(part, OPTIONS)
            assert (options.model, options.repeats) == (part.model, 3)
    (batch,) = bench_options(select(PARTS, "bs64-8b")[0], OPTIONS).batch
    assert batch == 64


def test_a_process_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    file = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(file)!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_limited([sys.executable, "-c", parent], 0.5) == "stopped after 0 s"
    time.sleep(2)
    assert not file.exists()
    assert run_limited([sys.executable, "-c", "raise SystemExit(3)"], 20) == "exit code 3"
    assert run_limited([sys.executable, "-c", ""], 20) is None


def test_nothing_begins_when_no_time_is_left() -> None:
    (failure,) = run_processes(select(PARTS, "*-8b"), OPTIONS)
    assert failure == "FAILED, whole or in part: nano-8b, bs1-8b, bs64-8b: no time was left"


def test_the_table() -> None:
    record = {"model": "m", "case": "bs1", "unit": "ms/step", "value": 0.75, "floor": 0.289}
    lines = table([{**record, "runs": [0.75, 0.8]}, {**record, "floor": None, "runs": []}])
    assert lines.splitlines()[2:] == [
        "| m | bs1 | 0.750 | ms/step | 0.289 | 0.750 0.800 |",
        "| m | bs1 | 0.750 | ms/step |  |  |",
    ]


def test_a_report_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    results = tmp_path / "results.jsonl"
    results.write_text('{"case": "of an earlier report"}\n')
    stand_in = ["--model", str(tmp_path), "--quick", "--repeats", "1", "--json", str(results)]
    result = script("report.gpu_report", "--only", "nano-0.6b,bs8-0.6b,pre*", *stand_in)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in results.read_text().splitlines()]
    cases = ["nano-4-16", "bs8-16-4", "prefill-2-32", "cold-64", "cached-64"]
    assert [record["case"] for record in records[1:]] == cases
    rows = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("| /")]
    assert [row[1] for row in rows] == cases


def test_a_report_that_fails_says_so(tmp_path: Path) -> None:
    options = ["--only", "nano-0.6b", "--model", str(tmp_path), "--json", str(tmp_path / "r.jsonl")]
    result = script("report.gpu_report", *options)
    assert result.returncode == 1
    assert "FAILED, whole or in part: nano-0.6b: exit code" in result.stdout
