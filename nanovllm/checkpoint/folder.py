"""What the folder of a model holds: its weights and its JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError

_WEIGHTS = {"model.safetensors": "*.safetensors", "pytorch_model.bin": "pytorch_model*.bin"}


def weight_files(folder: Path) -> tuple[Path, ...]:
    for single, pattern in _WEIGHTS.items():
        if (folder / single).is_file():
            return (folder / single,)
        if (index := folder / f"{single}.index.json").is_file():
            return _shards(index)
        if files := sorted(folder.glob(pattern)):
            return tuple(files)
    if gguf_file := single_gguf(folder):
        return (gguf_file,)
    raise CheckpointError(
        f"{folder} has no weights: looked for *.safetensors, pytorch_model.bin or one *.gguf, "
        f'found {listing(folder)}. Fetch them, or run without: load_format="dummy"'
    )


def single_gguf(folder: Path) -> Path | None:
    files = list(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def listing(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "nothing"


def _shards(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; fetch it again")
    files = tuple(index.parent / name for name in sorted(set(weight_map.values())))
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{index} names {', '.join(missing)}: missing, fetch them again")
    return files
