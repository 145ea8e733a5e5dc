"""Fetch from the Hugging Face hub only the files that are needed, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nanovllm.errors import CheckpointError

_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer*", "*_tokens*.json", "vocab.json", "merges.txt", "chat_template*")
_SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
_BIN = ("pytorch_model*.bin", "pytorch_model.bin.index.json")


def download(repo_id: str, *, need_weights: bool, need_tokenizer: bool) -> Path:
    """Return the folder of a hub model in the local cache, filled as far as needed."""
    tokenizer = _TOKENIZER_FILES if need_tokenizer else ()
    weights = _SAFETENSORS if need_weights else ()
    folder = _snapshot(repo_id, (*_CONFIG_FILES, *tokenizer, *weights))
    if need_weights and not any(folder.glob("*.safetensors")):
        folder = _snapshot(repo_id, _BIN)
    return folder


def _snapshot(repo_id: str, patterns: Sequence[str]) -> Path:
    """Fetch the files that match; a cached copy serves when the hub cannot be reached."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(patterns)))
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo_id!r} is neither a folder here nor a model on the Hugging Face hub that you "
            "may read; check the name, and for a gated model run `hf auth login`"
        ) from error
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise CheckpointError(
            f"{repo_id!r} is neither a folder here nor (completely) in the hub cache, and it "
            f"cannot be downloaded; connect to the network or pass a local folder: {error}"
        ) from error
