"""benchmarks/report/: tables and the chart are generated from the results."""

from __future__ import annotations

from benchmarks.report.plot import draw
from benchmarks.report.records import RESULTS, read_records
from benchmarks.report.tables import BLOCK, TABLES, rewrite
from tests.cli.terminal_process import ROOT

DOCUMENTS = [ROOT / "benchmarks" / "RESULTS.md", ROOT / "README.md"]


def test_the_documents_have_a_place_for_every_table_and_are_up_to_date() -> None:
    texts = [path.read_text() for path in DOCUMENTS]
    assert {found["name"] for text in texts for found in BLOCK.finditer(text)} == set(TABLES)
    records = read_records(str(ROOT / RESULTS))
    assert [rewrite(text, records) for text in texts] == texts
    assert draw(records, "qwen3-0.6b") == (ROOT / "docs" / "speed.svg").read_text()
