"""Results as --json of the benchmarks appends them, one line of JSON each, and tables of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.bench.report import number
from nanovllm.errors import ConfigError

Record = dict[str, Any]
RESULTS = "benchmarks/results.jsonl"


def read_records(path: str) -> list[Record]:
    try:
        return [json.loads(line) for line in Path(path).read_text().splitlines() if line]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read results from {path}: {error}") from error


def shown(value: float | None) -> str:
    return "" if value is None else number(value)


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """A table; the keys of the first row are its header."""
    header = list(rows[0])
    lines = [header, *([row.get(name, "") for name in header] for row in rows)]
    texts = ["".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]
    texts.insert(1, "---|" * len(header))
    return "\n".join(f"|{text}" for text in texts)
