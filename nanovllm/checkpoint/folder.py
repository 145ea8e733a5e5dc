"""What the folder of a model holds, and what it lacks: weights, a tokenizer, JSON files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WEIGHTS = {"model.safetensors": "*.safetensors", "pytorch_model.bin": "pytorch_model*.bin"}
_SHARD = re.compile(r"(.+-)\d{5}(-of-(\d{5})\..+)")


def weight_files(folder: Path) -> tuple[Path, ...]:
    files = _find_weights(folder)
    if missing := _absent(files):
        raise CheckpointError(f"{folder} needs {', '.join(missing)}: missing, fetch them again")
    if not files:
        raise CheckpointError(
            f"{folder} has no weights: looked for *.safetensors, pytorch_model.bin or one *.gguf, "
            f'found {listing(folder)}. Fetch them, or run without: load_format="dummy"'
        )
    return tuple(files)


def missing_files(folder: Path, *, need_weights: bool, need_tokenizer: bool) -> list[str]:
    """Name what is needed and not there, as far as the files that are there tell."""
    missing = _absent([folder / "config.json"])
    has_gguf = any(folder.glob("*.gguf"))  # which holds its own tokenizer
    if need_weights:
        files = _find_weights(folder)
        missing += _absent(files)
        if not files and not has_gguf:
            kinds = " or ".join(_WEIGHTS.values())
            missing.append(f'weights ({kinds}; load_format="dummy" needs none)')
    has_tokenizer = has_gguf or any((folder / name).is_file() for name in VOCABULARY_FILES)
    if need_tokenizer and not has_tokenizer:
        one_of = " or ".join(VOCABULARY_FILES)
        missing.append(f"a tokenizer ({one_of}; skip_tokenizer_init=True needs none)")
    return missing


def single_gguf(folder: Path) -> Path | None:
    files = list(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def listing(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "nothing"


def _find_weights(folder: Path) -> list[Path]:
    """The files that hold the weights, as those tell that are there; others may be missing."""
    for single, pattern in _WEIGHTS.items():
        if (folder / single).is_file():
            return [folder / single]
        if (index := folder / f"{single}.index.json").is_file():
            return [folder / name for name in _indexed_names(index)]
        names = {name for file in folder.glob(pattern) for name in _numbered_names(file.name)}
        if names:
            return [folder / name for name in sorted(names)]
    gguf_file = single_gguf(folder)
    return [gguf_file] if gguf_file else []


def _absent(files: list[Path]) -> list[str]:
    return [file.name for file in files if not file.is_file()]


def _indexed_names(index: Path) -> list[str]:
    """Names of files beside the index; a path could lead to any other file of the machine."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; fetch it again")
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for name in weight_map.values():
        is_name = isinstance(name, str) and not {"/", "\\", "\0"} & set(name)
        if not is_name or not name.endswith(suffix):
            raise CheckpointError(
                f"{index} names {name!r:.80} in its weight_map; only {suffix} files of the same "
                "folder may be named"
            )
    return sorted(set(weight_map.values()))


def _numbered_names(name: str) -> list[str]:
    """All shards of a set whose index is not there, by the number in the name of one."""
    shard = _SHARD.fullmatch(name)
    if shard is None:
        return [name]
    start, end, count = shard.groups()
    return [f"{start}{number:05}{end}" for number in range(1, int(count) + 1)]
