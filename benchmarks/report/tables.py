"""Rewrite tables in Markdown files from results, so that no number is copied by hand.

    python -m benchmarks.report.tables benchmarks/out/report.jsonl [benchmarks/RESULTS.md README.md]

A table lies between <!-- table NAME --> and <!-- end of table -->. The newest result of each case
counts; a table without any stays as it is, and a case without one keeps its number.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine import startup
from benchmarks.report.peers import PEERS
from benchmarks.report.records import Record, newest_by_case, read_records
from nanovllm.bench.report import number
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError

SMALL, LARGE, SPARSE = "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"
BLOCK = re.compile(
    r"(?P<begin><!-- table (?P<name>\S+) -->\n)(?P<old>.*?)(?P<end><!-- end of table -->)",
    re.DOTALL,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", help="a file of JSON lines")
    default = "benchmarks/RESULTS.md"
    parser.add_argument("files", nargs="*", default=[default], help=f"default: {default}")
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
    """Replace what lies between the marks of each table that there are results for."""
    usual = [record for record in records if is_usual(record)]

    def replaced(block: re.Match[str]) -> str:
        if block["name"] not in TABLES:
            raise ConfigError(f"no table is called {block['name']}, only {', '.join(TABLES)}")
        new = TABLES[block["name"]](usual, block["old"])
        return block[0] if new is None else f"{block['begin']}{new}\n{block['end']}"

    return BLOCK.sub(replaced, text)


def is_usual(record: Record) -> bool:
    """Whether a result is of a GPU and of the engine as it is used."""
    return record.get("device") == "cuda" and not record.get("enforce_eager")


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """Our numbers beside other engines', one row a case."""

    model: str
    title: str
    labels: dict[str, str]  # by case
    targets: dict[str, str] | None = None  # None: neither floors nor targets

    def __call__(self, records: list[Record], old: str) -> str | None:
        found = newest_by_case(records, self.model)
        measured = {case: found[case] for case in self.labels if case in found}
        if not measured:
            return None
        old_rows = {cells[0]: cells for cells in map(split_row, old.splitlines()) if cells}
        rows = [self._row(case, found.get(case), old_rows) for case in self.labels]
        kept = [case for case in self.labels if case not in measured]
        return "\n".join([*markdown(self._header(), rows), "", origin(measured, kept)])

    def _header(self) -> list[str]:
        ends = [] if self.targets is None else ["floor", "first target"]
        return [self.title, "nanovllm", *self._peers(), *ends]

    def _peers(self) -> list[str]:
        return list(
            dict.fromkeys(name for case in PEERS.get(self.model, {}).values() for name in case)
        )

    def _row(self, case: str, record: Record | None, old_rows: dict[str, list[str]]) -> list[str]:
        label = f"{self.labels[case]}, {'ms a step' if case.startswith('bs') else 'tok/s'}"
        theirs = PEERS.get(self.model, {}).get(case, {})
        peers = [number(theirs[name]) if name in theirs else "" for name in self._peers()]
        old = dict(zip(self._header(), old_rows.get(label, []), strict=False))
        ours = old.get("nanovllm", "") if record is None else number(record["value"])
        if self.targets is None:
            return [label, ours, *peers]
        floor = old.get("floor", "") if record is None else optional(record["floor"])
        return [label, ours, *peers, floor, self.targets.get(case, "")]


def prefix_table(records: list[Record], old: str) -> str | None:
    """Time to the first token of prompts that are new, and of those that begin alike."""
    found = newest_by_case(records, SMALL)
    lengths = [int(case.split("-")[1]) for case in found if re.fullmatch(r"cached-\d+", case)]
    cases = [(f"cold-{length}", f"cached-{length}") for length in sorted(lengths)]
    cases = [pair for pair in cases if pair[0] in found]
    if not cases:
        return None
    rows = []
    for cold, cached in cases:
        pair = found[cold], found[cached]
        values = [number(record["value"]) for record in pair]
        floors = [optional(record["floor"]) for record in pair]
        rows.append([f"{int(cold.split('-')[1]):,}", values[0], floors[0], values[1], floors[1]])
    header = ["shared tokens", "cold, ms", "floor", "cached, ms", "floor"]
    used = {case: found[case] for pair in cases for case in pair}
    intro = "`nanovllm bench prefix`, Qwen3-0.6B, time to the first token:"
    return "\n".join([intro, "", *markdown(header, rows), "", origin(used, [])])


def start_table(records: list[Record], old: str) -> str | None:
    found = newest_by_case(records, SMALL)
    starts = {kind: found[f"start-{kind}"] for kind in startup.BARS if f"start-{kind}" in found}
    if not starts:
        return None
    table = startup.table({kind: record["spans"] for kind, record in starts.items()})
    intro = "`python -m benchmarks.engine.startup`, Qwen3-0.6B, weights read from a local disk:"
    return "\n".join([intro, "", table, "", origin(starts, [])])


def compare_table(records: list[Record], old: str) -> str | None:
    found = newest_by_case(records, SMALL).get("compare")
    intro = "`python -m benchmarks.compare_transformers`, against transformers' `generate`:"
    return None if found is None else f"{intro}\n\n{found['text']}"


def trace_table(records: list[Record], old: str) -> str | None:
    """How long the GPU waits in a steady decode step."""
    found = newest_by_case(records, SMALL)
    traces = {
        case: record
        for case, record in found.items()
        if case.startswith("trace-bs") and record["between_ms"] is not None
    }
    if not traces:
        return None
    rows = []
    for case in sorted(traces, key=lambda case: int(case.removeprefix("trace-bs"))):
        record = traces[case]
        step, between, busy = record["step_ms"], record["between_ms"], record["busy_us"] / 1000
        idle = record["window_us"] / 1000 - busy
        cells = f"{step:.3f}", f"{between:.3f} ({between / step:.1%})", f"{busy:.3f}"
        batch = case.removeprefix("trace-bs")
        rows.append([batch, *cells, f"{idle:.3f} ({record['value']:.1f}%)"])
    header = ["batch", "ms a step", "ms between steps", "profiled: ms busy", "ms idle"]
    intro = (
        "`python -m benchmarks.engine.trace`, Qwen3-0.6B: a step, the time between two by events,\n"
        "and what the profiler sees, which itself slows down the host and the kernels:"
    )
    return "\n".join([intro, "", *markdown(header, rows), "", origin(traces, [])])


def markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["".join(f" {cell} |" if cell else " |" for cell in row) for row in [header, *rows]]
    lines.insert(1, "---|" * len(header))
    return [f"|{line}" for line in lines]


def split_row(line: str) -> list[str]:
    """The cells of a table's row; none of any other line."""
    is_row = line.startswith("|") and line.endswith("|")
    return [cell.strip() for cell in line[1:-1].split("|")] if is_row else []


def origin(records: dict[str, Record], kept: list[str]) -> str:
    """How the numbers came about, and which ones are older."""
    releases = {name: v for record in records.values() for name, v in record["versions"].items()}
    counts = sorted({len(record["runs"]) for record in records.values()})
    times = " or ".join(map(str, counts))
    runs = "one run each" if counts == [1] else f"medians of {times} runs after a warm-up"
    older = f"; older: {', '.join(kept)}" if kept else ""
    return f"{', '.join(f'{name} {v}' for name, v in releases.items())}; {runs}{older}."


def optional(value: float | None) -> str:
    return "" if value is None else number(value)


CASES = ("nano", "bs1", "bs8", "bs64", "bs256", "prefill")
SMALL_TARGETS = {
    "nano": "28,000",
    "bs1": "0.80",
    "bs64": "1.50",
    "bs256": "3.6",
    "prefill": "420,000",
}
LARGE_TARGETS = {"nano": "9,900", "bs1": "4.6", "bs64": "6.2"}
SPARSE_TARGETS = {"bs1": "1.3 times the floor", "bs64": ""}
README_LABELS = {
    "nano": "256 mixed requests",
    "bs1": "decode at batch 1",
    "bs64": "decode at batch 64",
    "bs256": "decode at batch 256",
    "prefill": "prefill",
}
TABLES: dict[str, Callable[[list[Record], str], str | None]] = {
    "qwen3-0.6b": SpeedTable(SMALL, "Qwen3-0.6B", {case: case for case in CASES}, SMALL_TARGETS),
    "qwen3-8b": SpeedTable(
        LARGE, "Qwen3-8B", {case: case for case in LARGE_TARGETS}, LARGE_TARGETS
    ),
    "qwen3-30b-a3b": SpeedTable(
        SPARSE, "Qwen3-30B-A3B", {case: case for case in SPARSE_TARGETS}, SPARSE_TARGETS
    ),
    "readme": SpeedTable(SMALL, "", README_LABELS),
    "compare": compare_table,
    "prefix": prefix_table,
    "startup": start_table,
    "trace": trace_table,
}


if __name__ == "__main__":
    sys.exit(exit_code(main))
