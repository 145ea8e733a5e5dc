"""benchmarks/report/: tables and the chart are generated from the results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report.plot import draw
from benchmarks.report.records import RESULTS, read_records
from benchmarks.report.tables import BLOCK, TABLES, rewrite
from nanovllm.errors import ConfigError
from tests.cli.terminal_process import ROOT

DOCUMENTS = [ROOT / "benchmarks" / "RESULTS.md", ROOT / "README.md"]


def record(model: str, case: str, value: float, **others: Any) -> dict[str, Any]:
    own = {"model": model, "case": case, "value": value, "unit": "ms/step, whole run"}
    return {**own, "floor": 2.0, "runs": [value] * 3, "device": "cuda", **others}


def table(name: str, records: list[dict[str, Any]]) -> list[str]:
    text = f"before\n<!-- table {name} -->\nold\n<!-- end of table -->\nafter\n"
    return rewrite(text, records).splitlines()[2:-2]


def test_the_documents_have_a_place_for_every_table_and_are_up_to_date() -> None:
    texts = [path.read_text() for path in DOCUMENTS]
    assert {found["name"] for text in texts for found in BLOCK.finditer(text)} == set(TABLES)
    records = read_records(str(ROOT / RESULTS))
    assert [rewrite(text, records) for text in texts] == texts
    assert draw(records, "qwen3-0.6b") == (ROOT / "docs" / "speed.svg").read_text()


def test_engines_side_by_side() -> None:
    records = [
        record("qwen3-8b", "bs1", 9.0, engine="nanovllm"),
        record("qwen3-8b", "bs1", 4.004, engine="nanovllm"),  # the newest result counts
        record("qwen3-8b", "bs1", 1.0, engine="nanovllm", device="cpu"),
        record("qwen3-8b", "bs1", 1.0),  # a decode step, not a whole run
        record("qwen3-8b", "bs64", 6.0, engine="nanovllm", floor=None),
        record("qwen3-8b", "bs1", 8.0, engine="vllm"),
        record("qwen3-0.6b", "bs1", 1.0, engine="nanovllm"),
    ]
    assert table("qwen3-8b", records) == [
        "| whole runs | nanovllm | vllm | floor |",
        "|---|---|---|---|",
        "| bs1, ms/step | 4.00 | 8.00 | 2.00 |",
        "| bs64, ms/step | 6.00 | | |",
    ]


def test_our_own_results() -> None:
    records = [
        record("m", "bs8", 0.9, unit="ms/step"),
        record("m", "bs8", 0.75, unit="ms/step"),
        record("m", "bs8", 0.1, unit="ms/step", enforce_eager=True),
        record("m", "bs8", 0.2, engine="vllm"),
        record("m", "start-cold", 30.0, cells={"seconds": "cold", "weights": "20.0"}),
    ]
    assert table("steps", records)[2:] == ["| m | bs8 | 0.750 | 2.00 |"]
    assert table("startup", records)[2:] == ["| cold | 20.0 |"]
    assert table("prefix", records) == ["old"]
    with pytest.raises(ConfigError, match=r"there is no table other; the tables are qwen3-0.6b"):
        table("other", [])
