"""Benchmark results as JSON lines: write, read, and format them as tables."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nanovllm.cli.options import at_least
from nanovllm.errors import ConfigError

Record = dict[str, Any]
RESULTS = "benchmarks/results.jsonl"


def keep(
    path: str | None, *, case: str, unit: str, runs: list[float], floor: float | None, **others: Any
) -> None:
    """Append a result to a file, if one is given; all benchmarks use this format."""
    if path is not None:
        record = {"case": case, "unit": unit, "runs": runs, "value": statistics.median(runs)}
        record |= {"floor": floor, **others, "versions": installed()}
        _append(path, json.dumps(record) + "\n")


def check_writable(path: str | None) -> None:
    """Fail before a measurement, rather than after it, if the file cannot be written."""
    if path is not None:
        _append(path, "")


def read_records(path: str) -> list[Record]:
    try:
        return [json.loads(line) for line in Path(path).read_text().splitlines() if line]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read results from {path}: {error}") from error


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Return a Markdown table; the keys of the first row are its header."""
    header = list(rows[0])
    lines = [header, *([row.get(name, "") for name in header] for row in rows)]
    texts = ["".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]
    texts.insert(1, "---|" * len(header))
    return "\n".join(f"|{text}" for text in texts)


def shown(value: float | None) -> str:
    return "" if value is None else number(value)


def number(value: float) -> str:
    """Format with at least three significant digits: 0.453, 12.3, 31,821."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def versions_text() -> str:
    return ", ".join(f"{name} {release}" for name, release in installed().items())


def installed() -> dict[str, str]:
    versions = {}
    for name in ("torch", "triton", "transformers", "vllm"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def add_result_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    text = "timed passes after a warm-up; the median is reported (default: %(default)s)"
    add("--repeats", type=at_least(1), default=3, metavar="N", help=text)
    add("--json", metavar="FILE", help="append each result as a line of JSON (default: none)")


def _append(path: str, text: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write results to {path}: {error.strerror}") from error
