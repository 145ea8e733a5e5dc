"""benchmarks/report/tables.py: the document's tables from results, and nothing else of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.plot import newest
from benchmarks.report.tables import BLOCK, TABLES, rewrite, split_row
from nanovllm.errors import ConfigError
from tests.bench.test_scripts import script
from tests.cli.terminal_process import ROOT

RESULTS = ROOT / "benchmarks" / "RESULTS.md"


def record(model: str, case: str, value: float, **others: Any) -> dict[str, Any]:
    common = {"floor": 2.0, "runs": [value] * 3, "device": "cuda", "dtype": "bfloat16"}
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    unit = "tok/s" if value > 100 else "ms/step"
    own = {"model": model, "case": case, "value": value, "unit": unit, "versions": versions}
    return {**common, **own, **others}


def block(name: str, text: str = "") -> str:
    return f"before\n<!-- table {name} -->\n{text}<!-- end of table -->\nafter\n"


def body(text: str) -> list[str]:
    found = BLOCK.search(text)
    assert found is not None
    return found["old"].splitlines()


def test_the_document_has_a_place_for_every_table_but_the_readmes() -> None:
    names = [found["name"] for found in BLOCK.finditer(RESULTS.read_text())]
    assert sorted([*names, "readme"]) == sorted(TABLES)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_all_but_our_column_is_the_documents_already(name: str) -> None:
    """Header, peers, targets and labels are the constants; a case without result is kept."""
    (found,) = [found for found in BLOCK.finditer(RESULTS.read_text()) if found["name"] == name]
    old = [cells for cells in map(split_row, found["old"].splitlines()) if cells]
    new = rewrite(found[0], [record(name, "bs1", 0.5, floor=0.25)])
    rows = [cells for cells in map(split_row, body(new)) if cells]
    expected = [list(cells) for cells in old]
    (changed,) = [cells for cells in expected if cells[0] == "bs1, ms a step"]
    changed[1], changed[-2] = "0.500", "0.250"
    assert rows == expected


def test_the_newest_usual_result_counts() -> None:
    records = [
        record("qwen3-8b", "nano", 9000.0),
        record("Qwen3-8B", "nano", 9900.4, runs=[1.0]),
        record("qwen3-8b", "nano", 1.0, device="cpu"),
        record("qwen3-8b", "nano", 1.0, enforce_eager=True),
        record("qwen3-8b", "nano-4-16", 1.0),
        record("qwen3-0.6b", "nano", 1.0),
    ]
    lines = body(rewrite(block("qwen3-8b"), records))
    assert (
        lines[0] == "| Qwen3-8B | nanovllm | nano-vllm + FA3 | vLLM 0.25.1 | floor | first target |"
    )
    assert lines[1] == "|---|---|---|---|---|---|"
    assert lines[2] == "| nano, tok/s | 9,900 | 8,233 | 8,971 | 2.00 | 9,900 |"
    assert lines[3] == "| bs1, ms a step | | 6.08 | 5.24 | | 4.6 |"
    assert lines[-1] == "torch 2.11.0, triton 3.6.0; one run each; older: bs1, bs64."


def test_rewriting_twice_changes_nothing_more() -> None:
    records = [record("qwen3-0.6b", case, 0.75) for case in ("bs1", "bs256")]
    once = rewrite(RESULTS.read_text(), records)
    assert once != RESULTS.read_text()
    assert rewrite(once, records) == once
    assert "triton 3.6.0; medians of 3 runs after a warm-up; older: nano, bs8, bs64" in once


def test_without_results_nothing_changes() -> None:
    assert rewrite(RESULTS.read_text(), []) == RESULTS.read_text()
    assert rewrite("no tables\n", [record("qwen3-8b", "nano", 1.0)]) == "no tables\n"
    with pytest.raises(ConfigError, match=r"no table is called other, only qwen3-0.6b"):
        rewrite(block("other"), [])


def test_the_readmes_table() -> None:
    text = rewrite(block("readme"), [record("qwen3-0.6b", "bs64", 1.5)])
    assert text.startswith("before\n<!-- table readme -->\n| | nanovllm | nano-vllm + FA3 |")
    assert "| decode at batch 64, ms a step | 1.50 | 3.36 | 3.89 | 2.73 |" in body(text)


def test_prefixes_starts_and_traces() -> None:
    small = "qwen3-0.6b"
    times = {"step_ms": 0.75, "between_ms": 0.003, "window_us": 800.0, "busy_us": 780.0}
    records = [
        record(small, "cold-1000", 6.0),
        record(small, "cached-1000", 1.25),
        record(small, "cached-64", 1.0),  # without its other half
        record(small, "start-cold", 30.0, spans={"imports": 10.0, "weights": 20.0}),
        record(small, "start-warm", 9.0, spans={"imports": 9.0}),
        record(small, "trace-bs64", 2.5, **times),
        record(small, "trace-bs1", 2.5, **times),
    ]
    assert "| 1,000 | 6.00 | 2.00 | 1.25 | 2.00 |" in body(rewrite(block("prefix"), records))
    assert not any("64" in line for line in body(rewrite(block("prefix"), records)))
    starts = body(rewrite(block("startup"), records))
    assert "| weights | 20.0 | 0.0 |" in starts
    assert "| process start to first token | 30.0 (bar: 60) | 9.0 (bar: 15) |" in starts
    comparison = {**record(small, "compare", 5.0), "text": "| a table |"}
    assert body(rewrite(block("compare"), [comparison]))[-1] == "| a table |"
    traces = body(rewrite(block("trace"), records))
    cells = "0.750 | 0.003 (0.4%) | 0.780 | 0.020 (2.5%)"
    assert traces[5:7] == [f"| {n} | {cells} |" for n in (1, 64)]


def test_the_script_and_the_chart_read_the_same_file(tmp_path: Path) -> None:
    results, document = tmp_path / "report.jsonl", tmp_path / "doc.md"
    records = [record("qwen3-0.6b", "nano", 28000.0), record("qwen3-0.6b", "trace-bs1", 2.5)]
    results.write_text("".join(json.dumps(each) + "\n" for each in records))
    document.write_text(block("qwen3-0.6b"))
    result = script("report.tables", str(results), str(document))
    assert (result.returncode, result.stdout) == (0, f"{document}: rewritten\n")
    assert "| nano, tok/s | 28,000 | 19,391 |" in document.read_text()
    assert list(newest(str(results), "qwen3-0.6b")) == ["nano"]
