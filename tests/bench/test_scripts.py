"""benchmarks/: the entry points, the trace's arithmetic, the table and the chart."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare_transformers import Floor, Measured, split, table
from benchmarks.engine.first_minute import Run
from benchmarks.engine.startup import PHASES
from benchmarks.engine.trace import Activity, Trace, read_activities, report, summarise, trace_line
from benchmarks.report.peers import PEERS
from benchmarks.report.plot import TITLES, draw, newest
from nanovllm.bench.report import Setup
from nanovllm.bench.workloads import Workload
from nanovllm.errors import ConfigError
from tests.bench.test_commands import CONFIG
from tests.cli.terminal_process import run_program


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program("-m", f"benchmarks.{name}", *arguments)


@pytest.mark.slow
def test_compare_transformers_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    workload = ["--num-seqs", "3", "--max-len", "16", "--hf-batch", "2", "--repeats", "1"]
    workload += ["--json", str(tmp_path / "compare.jsonl")]
    result = script("compare_transformers", "--model", str(tmp_path), "--device", "cpu", *workload)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "| | nanovllm | transformers | better by | floor |"
    names = [line.split("|")[1].strip() for line in lines[2:5]]
    assert names == ["throughput, tok/s", "time to first token, ms", "peak memory, GB"]
    (record,) = map(json.loads, (tmp_path / "compare.jsonl").read_text().splitlines())
    assert record["text"].strip() == result.stdout.strip()
    assert [side["engine"] for side in record["sides"]] == ["nanovllm", "transformers"]


def test_the_table_says_how_much_better() -> None:
    floor = Floor(1000.0, 1.0)
    ours = Measured("nanovllm", "cpu", "float32", [300, 1, 900], [10.0], 2.0, "a CPU", floor)
    theirs = Measured("transformers", "cpu", "float32", [100.0], [1.0, 90.0, 20.0], 1.0)
    assert table(ours, theirs).splitlines()[2:] == [
        "| throughput, tok/s | 300 | 100 | 3.00x | 1,000 |",
        "| time to first token, ms | 10.0 | 20.0 | 2.00x | 1.00 |",
        "| peak memory, GB | 2.00 | 1.00 | 0.50x |  |",
    ]
    assert "|  |\n" in table(replace(ours, floor=None), theirs)


@pytest.mark.slow
def test_startup_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--device", "cpu", "--max-model-len=512", "--json", str(tmp_path / "starts.jsonl")]
    result = script("engine.startup", "--model", str(tmp_path), *options)
    assert (result.returncode, result.stderr) == (0, "")
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [start["case"] for start in starts] == ["start-cold", "start-warm"]
    assert all(sum(start["spans"].values()) == start["value"] for start in starts)
    rows = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0]] == ["seconds", "cold", "warm"]
    assert [row[0].strip() for row in rows[2:-1]] == [*PHASES]
    assert all(0 < float(cell.split()[0]) < 100 for cell in rows[-1][1:])


@pytest.mark.slow
def test_the_first_minute(tmp_path: Path) -> None:
    result = script("engine.first_minute", "--runs", "1", "--json", str(tmp_path / "minute.jsonl"))
    assert result.returncode == 0, result.stderr
    (record,) = map(json.loads, (tmp_path / "minute.jsonl").read_text().splitlines())
    assert record["case"] == "first-minute"
    assert 0 < record["median_gap"] <= record["longest_gap"] < record["first"] < record["total"]
    assert result.stdout.splitlines()[-2].endswith("runs meet both bars")


def test_a_first_minute_is_held_against_two_bars() -> None:
    assert Run(first=5.9, median_gap=0.1, longest_gap=0.3, total=9.0).meets_bars
    assert not Run(first=6.1, median_gap=0.1, longest_gap=0.2, total=9.0).meets_bars
    assert not Run(first=2.0, median_gap=0.1, longest_gap=0.4, total=9.0).meets_bars


@pytest.mark.slow
def test_loading_on_a_cpu() -> None:
    result = script("engine.loading", "--gigabytes", "0.2", "--shards", "2", "--dtype", "float32")
    assert (result.returncode, result.stderr) == (0, "")
    cold, warm = result.stdout.splitlines()
    assert cold.startswith("cold: 0.20 GB of files into 0.40 GB in ")
    assert warm.startswith("warm: 0.20 GB of files into 0.40 GB in ")


def test_batches_keep_prompts_and_lengths_together() -> None:
    batches = split(Workload([[1], [2], [3]], [4, 5, 6]), 2)
    assert batches == [Workload([[1], [2]], [4, 5]), Workload([[3]], [6])]


def test_the_trace_needs_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = script("engine.trace")
    assert result.returncode == 2
    assert "has no CUDA device" in result.stderr


def test_busy_time_and_gaps(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 100.0, "dur": 40.0},
        {"ph": "X", "cat": "kernel", "name": "small", "ts": 110.0, "dur": 10.0},  # inside gemm
        {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": 0.0, "dur": 500.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 150.0, "dur": 20.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 170.0, "dur": 30.0},
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 900.0},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    summary = summarise(read_activities(str(path)))
    assert (summary.window, summary.busy, summary.gaps) == (100.0, 90.0, {"copy": 10.0})
    assert summary.kernels == {"gemm": [40.0, 30.0], "small": [10.0], "copy": [20.0]}
    assert summary.advances == {"gemm": 70.0, "small": 0.0, "copy": 30.0}
    lines = [line.split() for line in report(summary, num_steps=2).splitlines()]
    assert lines[1] == ["45.0", "90.0%", "2.0", "GPU", "busy"]
    assert lines[2][:2] == ["5.0", "10.0%"]
    assert lines[3] == ["5.0", "10.0%", "before", "copy"]
    assert lines[5] == ["35.0", "70.0%", "1.0", "gemm"]
    assert lines[8] == ["activities", "by", "how", "much", "later", "they", "end:"]
    assert lines[10] == ["15.0", "30.0%", "0.5", "copy"]


def test_a_trace_as_json() -> None:
    activities = [Activity("gemm", 0.0, 30.0), Activity("copy", 40.0, 60.0)]
    trace = Trace(
        64, 2, step_ms=0.02, between_ms=0.001, profiled_ms=0.03, summary=summarise(activities)
    )
    line = trace_line(Setup("m", "cuda", "bfloat16", None), trace)
    assert line.endswith("}\n")
    record = json.loads(line)
    assert (record["case"], record["model"], record["unit"]) == ("trace-bs64", "m", "% idle")
    assert record["value"] == pytest.approx(100 / 6)
    assert (record["window_us"], record["busy_us"]) == (30.0, 25.0)
    assert (record["gaps_us"], record["kernels_us"]) == (
        {"copy": 5.0},
        {"gemm": 15.0, "copy": 10.0},
    )
    assert record["advances_us"] == {"gemm": 15.0, "copy": 15.0}


def test_an_empty_trace_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no GPU activity"):
        summarise([])
    assert summarise([Activity("a", 5.0, 7.0)]).busy == 2.0


def records(model: str, **values: float) -> str:
    common = {"unit": "tok/s", "floor": 2.0, "device": "cuda", "dtype": "bfloat16", "model": model}
    return "".join(json.dumps({"case": c, "value": v, **common}) + "\n" for c, v in values.items())


def test_the_newest_result_of_each_case_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(records("m", prefill=1, nano=2) + records("other", nano=9) + '{"case": "x"}\n')
    with path.open("a") as file:
        file.write(records("m", nano=3))
    found = newest(str(path), "m")
    assert {case: record["value"] for case, record in found.items()} == {"nano": 3, "prefill": 1}
    with pytest.raises(ConfigError, match="has no result of unknown"):
        newest(str(path), "unknown")


def test_every_peer_has_a_panel() -> None:
    assert all(set(cases) <= set(TITLES) for cases in PEERS.values())


def test_the_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.jsonl"
    path.write_text(records("qwen3-0.6b", nano=28000, bs1=0.8))
    draw(newest(str(path), "qwen3-0.6b"), "qwen3-0.6b", str(tmp_path / "speed.svg"))
    assert "<svg" in (tmp_path / "speed.svg").read_text()
