"""Read the files in the folder of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError

SPECIAL_FLOATS = ("NaN", "Infinity", "-Infinity")


def read_json(file: Path, kind: type = dict) -> Any:
    """Read a JSON object or, if `kind` is `list`, a list."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_hook=_decode_float)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, kind):
        expected = "object" if kind is dict else "list"
        raise CheckpointError(f"{file} must hold a JSON {expected}, not a {type(content).__name__}")
    return content


def _decode_float(value: dict[str, Any]) -> Any:
    """Decode numbers that JSON lacks, which transformers 5 writes as {"__float__": "Infinity"}."""
    is_number = value.keys() == {"__float__"} and value["__float__"] in SPECIAL_FLOATS
    return float(value["__float__"]) if is_number else value


def check_regular(path: Path) -> None:
    """Raise for a file, or a file in a folder, that is a pipe, socket or device.

    Reading one may never end.
    """
    for file in path.iterdir() if path.is_dir() else (path,):
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise CheckpointError(f"{file} is a pipe, socket or device; replace it by a file")
