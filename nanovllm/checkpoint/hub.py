"""Fetch from the Hugging Face hub only the files that are needed, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nanovllm.errors import CheckpointError

_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer*", "*_tokens*.json", "vocab.json", "merges.txt", "chat_template*")
_SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
_BIN = ("pytorch_model*.bin", "pytorch_model.bin.index.json")


def download(
    repo_id: str, revision: str | None, *, need_weights: bool, need_tokenizer: bool
) -> Path:
    """Return the folder of a hub model in the local cache, filled as far as needed."""
    tokenizer = _TOKENIZER_FILES if need_tokenizer else ()
    weights = _SAFETENSORS if need_weights else ()
    folder = _snapshot(repo_id, revision, (*_CONFIG_FILES, *tokenizer, *weights))
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{repo_id!r} on the Hugging Face hub has no config.json; if it holds GGUF files, pass "
            f'one of them as "{repo_id}/file.gguf"'
        )
    if need_weights and not any(folder.glob("*.safetensors")):
        folder = _snapshot(repo_id, revision, _BIN)
    return folder


def download_file(repo_id: str, revision: str | None, name: str) -> Path:
    """Return one file of a hub model in the local cache."""
    file = _snapshot(repo_id, revision, (name,)) / name
    if not file.is_file():
        raise CheckpointError(f"{repo_id!r} on the Hugging Face hub has no file {name!r}")
    return file


def _snapshot(repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Fetch the files that match; a cached copy serves when the hub cannot be reached."""
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
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403, 404):
            raise CheckpointError(
                f"{repo_id!r} is neither a folder here nor a model on the Hugging Face hub that "
                "you may read; check the name, and for a gated or private model ask for access "
                "on its page, then set HF_TOKEN or run `hf auth login`"
            ) from error
        wanted = repo_id if revision is None else f"{repo_id} at revision {revision}"
        raise CheckpointError(
            f"{wanted!r} is neither a folder here nor (completely) in the hub cache, and it "
            f"cannot be downloaded; connect to the network or pass a local folder: {error}"
        ) from error
