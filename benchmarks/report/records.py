"""Results as --json of the benchmarks appends them: one line of JSON each, the newest last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError

Record = dict[str, Any]


def read_records(path: str) -> list[Record]:
    try:
        return [json.loads(line) for line in Path(path).read_text().splitlines() if line]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read results from {path}: {error}") from error


def newest_by_case(records: list[Record], model: str) -> dict[str, Record]:
    of_model = [record for record in records if str(record.get("model")).lower() == model]
    return {record["case"]: record for record in of_model}
