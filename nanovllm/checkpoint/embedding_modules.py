"""Read the modules of an embedding model in the format of sentence-transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanovllm.checkpoint.folder_files import check_regular, read_json
from nanovllm.config import ConfigJson
from nanovllm.engine.step import Pooling
from nanovllm.errors import CheckpointError, UnsupportedModelError

POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
# Older pooling configs have one boolean field per mode instead of "pooling_mode": field -> mode.
FLAGS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
KINDS = {"Transformer", "Pooling", "Dense", "Normalize"}
IDENTITY = "torch.nn.modules.linear.Identity"


@dataclass(frozen=True, slots=True)
class EmbeddingModules:
    """The modules after the language model, except Normalize: `LLM.embed` has an option for it."""

    pooling: Pooling
    dense: tuple[Path, ...]  # folders of linear layers, applied to the pooled vector in order


def read_embedding_modules(folder: Path) -> EmbeddingModules | None:
    """Read modules.json; return None if it lists no pooling, as in a reranker's folder."""
    try:
        modules = [
            (str(each["type"]).rpartition(".")[2], folder / each["path"])
            for each in read_json(folder / "modules.json", list)
        ]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/modules.json must list types and paths") from error
    poolings = [path for kind, path in modules if kind == "Pooling"]
    if not poolings:
        return None
    if unknown := [kind for kind, _ in modules if kind not in KINDS]:
        raise UnsupportedModelError(f"modules.json lists {unknown[0]!r}, which is not supported")
    dense = tuple(path for kind, path in modules if kind == "Dense")
    for path in (poolings[0], *dense):
        check_regular(path)
    for path in dense:
        activation = read_json(path / "config.json").get("activation_function")
        if activation != IDENTITY:
            raise UnsupportedModelError(f"{path}: activation_function {activation} is unsupported")
    return EmbeddingModules(_read_pooling(read_json(poolings[0] / "config.json")), dense)


def _read_pooling(config: ConfigJson) -> Pooling:
    modes = config.get("pooling_mode")
    if modes is None:
        flags = [name for name in config if name.startswith("pooling_mode_") and config[name]]
        modes = [FLAGS.get(name, name) for name in flags]
    modes = [modes] if isinstance(modes, str) else modes
    if modes not in [[name] for name in POOLINGS] or config.get("include_prompt") is False:
        raise UnsupportedModelError(
            f"this embedding model's pooling is not supported: {config}; only the last token and "
            "the mean over all tokens are"
        )
    return POOLINGS[modes[0]]
