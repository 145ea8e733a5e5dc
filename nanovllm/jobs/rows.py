"""The rows of a batch job: a stream from a file, so that any number of them fits into memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.errors import ConfigError

MAX_WINDOW_ROWS = 4096
READ_BYTES = 2**20
JSON_TYPES = frozenset((str, int, bool, type(None)))


@dataclass(frozen=True, slots=True)
class Row:
    index: int  # among those of the file
    fields: dict[str, Any]
    error: str | None = None  # why it has no fields

    @property
    def is_batch(self) -> bool:
        """Whether it is a row of OpenAI's batch format, and not a plain one."""
        return "custom_id" in self.fields and "body" in self.fields

    @property
    def custom_id(self) -> Any:
        return self.fields.get("custom_id")


@dataclass(frozen=True, slots=True)
class Scan:
    """What one reading of the whole input finds out."""

    digest: str
    num_rows: int


def read_rows(path: Path, only_ids: bool = False) -> Iterator[Row]:
    """Yield the rows of a JSONL or Parquet file; empty lines are none.

    With `only_ids`, rows that cannot have a custom_id may come without their fields, unread.
    """
    is_parquet = path.suffix == ".parquet"
    items = _parquet_rows(path) if is_parquet else _json_lines(path, only_ids)
    return (_row(index, item) for index, item in enumerate(items))


def scan(path: Path) -> Scan:
    """Read everything once; raise ConfigError if two rows have the same id."""
    digest, num_rows = hashlib.sha256(), 0
    with _open(path) as file:
        if not file.seekable():
            raise ConfigError(f"cannot read {path} twice, as a job must; write it to a file first")
        while data := file.read(READ_BYTES):
            digest.update(data)
    hashes: list[np.ndarray] = []
    rows = read_rows(path, only_ids=True)
    while window := list(islice(rows, MAX_WINDOW_ROWS)):
        num_rows += len(window)
        ids = [row.custom_id for row in window if row.is_batch]
        hashes.append(np.array([_hash(custom_id) for custom_id in ids], np.uint64))
    _refuse_duplicates(path, np.concatenate([np.zeros(0, np.uint64), *hashes]))
    return Scan(digest.hexdigest(), num_rows)


def windows(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Group rows, and put those whose prompts begin alike next to each other in each group."""
    iterator = iter(rows)
    while window := list(islice(iterator, MAX_WINDOW_ROWS)):
        yield sorted(window, key=_prompt_bytes)


def _prompt_bytes(row: Row) -> bytes:
    body = row.fields.get("body", row.fields)
    if not isinstance(body, dict):
        return b""
    prompts = (body.get(name) for name in ("prompt", "messages", "input"))
    prompt = next((each for each in prompts if each is not None), None)
    tools = json.dumps(body["tools"]).encode() if body.get("tools") else b""
    if isinstance(prompt, list):
        with contextlib.suppress(TypeError, OverflowError):  # it is no list of ids
            return tools + array("L", prompt).tobytes()
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return tools + text.encode("utf-8", "surrogatepass")


def _row(index: int, item: Any) -> Row:
    if isinstance(item, ValueError):
        return Row(index, {}, f"it is not valid JSON: {item}")
    if not isinstance(item, dict):
        return Row(index, {}, "it is not a JSON object")
    return Row(index, item)


def _json_lines(path: Path, only_ids: bool) -> Iterator[Any]:
    with _open(path) as file:
        for line in file:
            if not line.isspace():
                if only_ids and b"custom_id" not in line and b"\\u" not in line:  # nor spelt so
                    yield {}
                    continue
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield ValueError(str(error))


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError("to read Parquet: pip install pyarrow") from error
    with _open(path) as file:
        try:
            for batch in ParquetFile(file).iter_batches(READ_BYTES // 1024):
                yield from map(_json_value, batch.to_pylist())
        except ArrowInvalid as error:
            raise ConfigError(f"cannot read {path}: {error}") from error


def _json_value(value: Any) -> Any:
    """What Parquet has and JSON has not: dates as ISO has them, bytes in base64, NaN as null."""
    if isinstance(value, dict):
        return {name: _json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        types = {*map(type, value)}  # thousands of ids, or of an embedding's numbers
        is_plain = types <= JSON_TYPES or (types == {float} and all(map(math.isfinite, value)))
        return value if is_plain else [_json_value(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if type(value) in JSON_TYPES:
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _hash(custom_id: Any) -> int:
    text = json.dumps(custom_id, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _refuse_duplicates(path: Path, hashes: np.ndarray) -> None:
    values, counts = np.unique(hashes, return_counts=True)
    doubled = {int(value) for value in values[counts > 1]}
    if not doubled:
        return
    first = next(r for r in read_rows(path) if r.is_batch and _hash(r.custom_id) in doubled)
    raise ConfigError(f"{path}: several rows have the custom_id {first.custom_id!r:.80}")
