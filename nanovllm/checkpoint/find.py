"""Resolve a short name, a folder, a file or a hub id to a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.checkpoint import gguf
from nanovllm.checkpoint.embedding_modules import EmbeddingModules, read_embedding_modules
from nanovllm.checkpoint.folder_files import check_regular, read_json
from nanovllm.checkpoint.gguf_file import open_gguf
from nanovllm.checkpoint.hub import fetch, packaged_gguf
from nanovllm.checkpoint.multimodal import text_config
from nanovllm.checkpoint.quantization import ROUND_TO_FP8, choose_quantization
from nanovllm.checkpoint.quantized.weight_format import Quantization
from nanovllm.config import ConfigJson
from nanovllm.errors import CheckpointError, ConfigError

BUILT_IN = "smollm2"
# The built-in model's generation config has no temperature, and a model this small writes gibberish
# at 1.0.
BUILT_IN_TEMPERATURE = 0.3
# File patterns, in order of preference.
_WEIGHTS = (
    *("model.safetensors", "model-*.safetensors", "*.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*.bin", "*.gguf"),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything known about a model before its weights are read."""

    path: Path  # the folder, or the GGUF file
    config: ConfigJson  # in the layout of config.json, also for GGUF
    generation_config: ConfigJson
    weight_files: tuple[Path, ...]
    quantization: Quantization | None = None  # None: float, GGUF or MXFP4 weights
    embedding: EmbeddingModules | None = None  # set if the model only embeds

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are in a GGUF file."""
        return any(file.suffix == ".gguf" for file in self.weight_files)

    @property
    def is_quantized(self) -> bool:
        """Whether `quantization_config` declares quantized weights; False for GGUF and MXFP4."""
        return self.quantization is not None and self.quantization != ROUND_TO_FP8


def stores_quantized(config: ConfigJson) -> bool:
    """Return whether the config declares quantized weights, in any format but MXFP4."""
    return bool(stored_quantization(config) or config.get(gguf.BLOCK_TYPES_KEY))


def stored_quantization(config: ConfigJson) -> Any:
    """Return `quantization_config`, or None for MXFP4 weights, which transformers dequantizes."""
    return None if is_mxfp4(config) else config.get("quantization_config")


def is_mxfp4(config: ConfigJson) -> bool:
    """Return whether this is GPT-OSS with its experts in MXFP4."""
    stored = config.get("quantization_config")
    is_gpt_oss = config.get("architectures") == ["GptOssForCausalLM"]
    return is_gpt_oss and isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"


def find_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    need_weights: bool = True,
    need_tokenizer: bool = True,
    quantization: str | None = None,
    check: Callable[[ConfigJson], object] = lambda config: None,
) -> Checkpoint:
    """Locate a model, on the hub if it is not on this machine, and read its configuration.

    `check` receives the configuration, and may raise. Except for GGUF files, it runs before weights
    and tokenizer are downloaded.
    """

    def check_configs(file: Path) -> None:
        check(_read_config(file))
        _read_embedding(file.parent)

    path = _local_path(model, revision)
    if path is None:
        path = fetch(model, revision, need_weights, need_tokenizer, check_configs)
    checkpoint = _read(path, need_weights)
    if model.lower() == BUILT_IN:
        generation_config = {"temperature": BUILT_IN_TEMPERATURE, **checkpoint.generation_config}
        checkpoint = replace(checkpoint, generation_config=generation_config)
    check(checkpoint.config)
    if checkpoint.path.suffix == ".gguf" and quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} is not for GGUF files, whose tensors define their "
            "own quantization; leave the option out"
        )
    stored = stored_quantization(checkpoint.config)
    if quantization is None and stored is None:
        return checkpoint
    return replace(checkpoint, quantization=choose_quantization(quantization, stored))


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return every token id that ends a generation, from the generation config or the config."""
    for config in (checkpoint.generation_config, checkpoint.config):
        ids = config.get("eos_token_id")
        if ids is not None and ids != []:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(token) is int for token in ids):
                raise CheckpointError(f"eos_token_id must be an integer or a list, got {ids}")
            return tuple(ids)
    return ()


def _local_path(model: str, revision: str | None) -> Path | None:
    """Return `model` as a path if it exists, or its GGUF file in an installed package, if any."""
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):  # unlike path.exists(), this accepts names of any length
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r} selects a version on the hub, but {path} is a local path; "
                "leave revision out"
            )
        return path
    return packaged_gguf(model) if revision is None else None


def _read(path: Path, need_weights: bool) -> Checkpoint:
    check_regular(path)
    if path.is_dir():
        return _from_folder(path, need_weights)
    if path.suffix == ".gguf":
        return _from_gguf(path, need_weights)
    if path.suffix == ".json" and not need_weights:
        return Checkpoint(path.parent, _read_config(path), _read_generation_config(path.parent), ())
    raise CheckpointError(
        f"{path} is a file; pass a folder with config.json and weights, or a .gguf file "
        '(a config.json alone is enough with load_format="dummy")'
    )


def _from_gguf(path: Path, need_weights: bool) -> Checkpoint:
    reader = open_gguf(path)  # opened once: parsing the vocabulary takes 0.1 s
    config = gguf.read_config(path, reader)
    generation_config = gguf.read_generation_config(reader)
    embedding = None
    if (pooling := gguf.read_pooling(path, reader)) is not None:
        embedding = EmbeddingModules(pooling, ())
    files = (path,) if need_weights else ()
    return Checkpoint(path, config, generation_config, files, embedding=embedding)


def _from_folder(folder: Path, need_weights: bool) -> Checkpoint:
    if not (folder / "config.json").is_file():
        if len(gguf_files := list(folder.glob("*.gguf"))) == 1:
            return _from_gguf(gguf_files[0], need_weights)
        raise CheckpointError(
            f"{folder} has no config.json; it holds {_listing(folder)}. Pass the folder of a "
            "Hugging Face model, or the path of one .gguf file (on the hub: org/name/file.gguf)"
        )
    config = _read_config(folder / "config.json")
    files = _weight_files(folder) if need_weights else ()
    generation_config, embedding = _read_generation_config(folder), _read_embedding(folder)
    return Checkpoint(folder, config, generation_config, files, embedding=embedding)


def _read_embedding(folder: Path) -> EmbeddingModules | None:
    return read_embedding_modules(folder) if (folder / "modules.json").is_file() else None


def _read_config(file: Path) -> ConfigJson:
    """Read config.json; for a multimodal model, return the config of its text model."""
    config = read_json(file)
    is_multimodal = "ForConditionalGeneration" in str(config.get("architectures"))
    return text_config(config) if is_multimodal else config


def _read_generation_config(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def _weight_files(folder: Path) -> tuple[Path, ...]:
    candidates = (sorted(folder.glob(pattern)) for pattern in _WEIGHTS)
    files = next((files for files in candidates if files), [])
    if not files or (len(files) > 1 and files[0].suffix == ".gguf"):
        raise CheckpointError(
            f"{folder} has no weights: looked for *.safetensors, pytorch_model.bin or one *.gguf, "
            f'found {_listing(folder)}. Fetch them, or run without: load_format="dummy"'
        )
    shard = re.search(r"-of-(\d+)\.\w+$", files[0].name)
    if shard is not None and len(files) != int(shard[1]):
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{folder} has {names}: some are missing; fetch them again")
    return tuple(files)


def _listing(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "nothing"
