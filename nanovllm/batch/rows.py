"""The rows of a batch job, streamed from a file of any size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError, file_errors

MAX_WINDOW_ROWS = 4096
READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    index: int  # index in the file
    fields: dict[str, Any]
    error: str | None = None  # set if the row could not be parsed

    @property
    def is_batch(self) -> bool:
        """Whether the row is in OpenAI's batch format instead of the plain one."""
        return "custom_id" in self.fields and "body" in self.fields

    @property
    def custom_id(self) -> Any:
        return self.fields.get("custom_id")


@dataclass(frozen=True, slots=True)
class Scan:
    """Properties of the whole input file."""

    digest: str
    num_rows: int


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSONL or Parquet file; blank lines are skipped."""
    if path.suffix == ".parquet":
        return (Row(index, fields) for index, fields in enumerate(_parquet_rows(path)))
    return _json_rows(path)


def scan(path: Path) -> Scan:
    """Read the whole input file; raise ConfigError if two rows have the same custom_id."""
    digest = hashlib.sha256()
    with _open(path) as file:
        if not file.seekable():
            raise ConfigError(f"{path} must be a regular file: a batch job reads its input twice")
        while data := file.read(READ_BYTES):
            digest.update(data)
    num_rows, hashes = 0, set()
    for row in read_rows(path):
        num_rows += 1
        if row.is_batch and isinstance(row.custom_id, str):
            if hash(row.custom_id) in hashes:
                raise ConfigError(f"{path}: several rows have the custom_id {row.custom_id!r:.80}")
            hashes.add(hash(row.custom_id))
    return Scan(digest.hexdigest(), num_rows)


def windows(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield groups of rows, each sorted so that rows with a common prefix are adjacent."""
    iterator = iter(rows)
    while window := list(islice(iterator, MAX_WINDOW_ROWS)):
        yield sorted(window, key=_prompt_text)


def _prompt_text(row: Row) -> str:
    body = row.fields.get("body", row.fields)
    names = ("tools", "prompt", "messages", "input")
    prompt = [body.get(name) for name in names] if isinstance(body, dict) else None
    return json.dumps(prompt, default=str)


def _json_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        lines = (line for line in file if not line.isspace())
        for index, line in enumerate(lines):
            try:
                fields = json.loads(line)
                error = None if isinstance(fields, dict) else "the row is not a JSON object"
            except (ValueError, RecursionError) as failure:
                error = f"the row is not valid JSON: {failure}"
            yield Row(index, {} if error else fields, error)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError("reading Parquet needs pyarrow: pip install pyarrow") from error
    with _open(path) as file:
        try:
            for batch in ParquetFile(file).iter_batches(READ_BYTES // 1024):
                yield from batch.to_pylist()
        except ArrowInvalid as error:
            raise ConfigError(f"cannot read {path}: {error}") from error


def _open(path: Path) -> Any:
    with file_errors("read", path):
        return open(path, "rb")
