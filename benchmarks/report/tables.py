"""Rewrite the tables of Markdown files from results, so that no number is copied by hand.

    python -m benchmarks.report.tables [--results FILE] [benchmarks/RESULTS.md README.md]

A table is enclosed by <!-- table NAME --> and <!-- end of table -->. The latest result of each case
is shown. A table without any results is left unchanged.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report.records import RESULTS, Record, markdown, read_records, shown
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError

BLOCK = re.compile(
    r"(?P<begin><!-- table (?P<name>\S+) -->\n)(?P<old>.*?)(?P<end><!-- end of table -->)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class EngineTable:
    """Whole runs of several engines, with one row per case."""

    model: str
    labels: dict[str, str]  # keyed by case
    has_floors: bool = True

    def rows(self, records: list[Record]) -> list[dict[str, str]]:
        own = [each for each in records if each["model"] == self.model and "engine" in each]
        found = {
            (each["case"], each["engine"]): each for each in own if each["case"] in self.labels
        }
        engines = dict.fromkeys(engine for _, engine in found)
        rows = []
        for case in [case for case in self.labels if (case, "nanovllm") in found]:
            ours = found[case, "nanovllm"]
            cells = {"whole runs": f"{self.labels[case]}, {ours['unit'].partition(',')[0]}"}
            for engine in engines:
                cells[engine] = shown(found.get((case, engine), {}).get("value"))
            if self.has_floors:
                cells["floor"] = shown(ours["floor"])
            rows.append(cells)
        return rows


@dataclass(frozen=True, slots=True)
class CaseTable:
    """Results of our engine alone, with one row each."""

    pattern: str  # matches the cases

    def rows(self, records: list[Record]) -> list[dict[str, str]]:
        own = [each for each in records if "engine" not in each]
        matching = [each for each in own if re.fullmatch(self.pattern, each["case"])]
        newest = {(each["model"], each["case"]): each for each in matching}
        return [each.get("cells") or self._row(each) for each in newest.values()]

    def _row(self, record: Record) -> dict[str, str]:
        cells = {"model": record["model"], "case": record["case"]}
        return cells | {record["unit"]: shown(record["value"]), "floor": shown(record["floor"])}


CASES = {case: case for case in ("nano", "bs1", "bs8", "bs64", "bs256", "prefill")}
README_LABELS = {
    "nano": "256 mixed requests",
    "bs1": "batch 1",
    "bs64": "batch 64",
    "prefill": "64 prompts of 2,048 tokens",
}
TRANSFORMERS_LABELS = {"nano-64-512": "64 mixed requests", "first": "first token after 512"}
TABLES = {
    "qwen3-0.6b": EngineTable("qwen3-0.6b", CASES),
    "qwen3-8b": EngineTable("qwen3-8b", CASES),
    "readme": EngineTable("qwen3-0.6b", README_LABELS, has_floors=False),
    "transformers": EngineTable("qwen3-0.6b", TRANSFORMERS_LABELS),
    "steps": CaseTable(r"bs\d+"),
    "prefix": CaseTable(r"(cold|cached)-\d+"),
    "startup": CaseTable(r"start-.*"),
    "trace": CaseTable(r"trace-.*"),
    "features": CaseTable(r"features-.*"),
    "weights": CaseTable(r"weights-.*"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default=RESULTS, help=f"JSON lines (default: {RESULTS})")
    default = ["benchmarks/RESULTS.md", "README.md"]
    parser.add_argument("files", nargs="*", default=default, help=f"default: {' '.join(default)}")
    args = parser.parse_args()
    records = read_records(args.results)
    for name in args.files:
        path = Path(name)
        before = path.read_text()
        after = rewrite(before, records)
        path.write_text(after)
        print(f"{name}: {'rewritten' if before != after else 'nothing to change'}")
    return 0


def rewrite(text: str, records: list[Record]) -> str:
    """Replace the contents of each table that has results."""
    usual = [
        each
        for each in records
        if each.get("device") == "cuda"
        and not each.get("enforce_eager")
        and each.get("kv_cache_dtype", "auto") == "auto"
    ]

    def replaced(block: re.Match[str]) -> str:
        if block["name"] not in TABLES:
            raise ConfigError(
                f"there is no table {block['name']}; the tables are {', '.join(TABLES)}"
            )
        rows = TABLES[block["name"]].rows(usual)
        return f"{block['begin']}{markdown(rows)}\n{block['end']}" if rows else block[0]

    return BLOCK.sub(replaced, text)


if __name__ == "__main__":
    sys.exit(exit_code(main))
