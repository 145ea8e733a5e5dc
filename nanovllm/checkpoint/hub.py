"""Fetch from the Hugging Face hub only the files that are needed, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nanovllm.checkpoint.folder import missing_files
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
    has_config = (folder / "config.json").is_file()
    if has_config and need_weights and not any(folder.glob("*.safetensors")):
        folder = _snapshot(repo_id, revision, _BIN)
    missing = missing_files(folder, need_weights=need_weights, need_tokenizer=need_tokenizer)
    if missing:
        _check_hub_answers(repo_id, revision, folder, missing)
    if not has_config:
        raise CheckpointError(
            f"{repo_id!r} on the Hugging Face hub has no config.json; if it holds GGUF files, pass "
            f'one of them as "{repo_id}/file.gguf"'
        )
    return folder


def download_file(repo_id: str, revision: str | None, name: str) -> Path:
    """Return one file of a hub model in the local cache."""
    folder = _snapshot(repo_id, revision, (name,))
    if not (folder / name).is_file():
        _check_hub_answers(repo_id, revision, folder, [name])
        raise CheckpointError(f"{repo_id!r} on the Hugging Face hub has no file {name!r}")
    return folder / name


def _snapshot(repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Fetch the files that match; a cached copy serves when the hub cannot be reached."""
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError, httpx.HTTPError) as error:
        _raise_refusal(repo_id, revision, error)
        raise CheckpointError(
            f"{_at(repo_id, revision)!r} is neither a folder here nor (completely) in the hub "
            "cache, and it cannot be downloaded; connect to the network or pass a local folder: "
            f"{error}"
        ) from error


def _check_hub_answers(
    repo_id: str, revision: str | None, folder: Path, missing: Sequence[str]
) -> None:
    """Raise if the folder came from the cache alone, where what is missing may be on the hub."""
    import httpx
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.constants import DEFAULT_REVISION

    try:
        HfApi().model_info(repo_id, revision=revision or DEFAULT_REVISION)
    except (OSError, httpx.HTTPError) as error:
        _raise_refusal(repo_id, revision, error)
        reason, remedy = f"could not be reached ({error})", "connect to the network"
        if is_offline_mode():
            reason, remedy = "may not be asked (HF_HUB_OFFLINE is set)", f"unset it and {remedy}"
        raise CheckpointError(
            f"{_at(repo_id, revision)!r} is only partly in the hub cache, and the Hugging Face hub "
            f"{reason}; {remedy}, or pass {_local_choices(repo_id, folder)}. "
            f"Missing from {folder}: {', '.join(missing)}"
        ) from error


def _raise_refusal(repo_id: str, revision: str | None, error: Exception) -> None:
    """Name what the hub does not have or does not give, if that is its answer."""
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    if isinstance(error, RevisionNotFoundError):
        raise CheckpointError(
            f"{repo_id!r} on the Hugging Face hub has no revision {revision!r}; pass one of its "
            "branches, tags or commits"
        ) from error
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
        raise CheckpointError(
            f"{repo_id!r} is neither a folder here nor a model on the Hugging Face hub that "
            "you may read; check the name, and for a gated or private model ask for access "
            "on its page, then set HF_TOKEN or run `hf auth login`"
        ) from error


def _at(repo_id: str, revision: str | None) -> str:
    return repo_id if revision is None else f"{repo_id} at revision {revision}"


def _local_choices(repo_id: str, folder: Path) -> str:
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf"))
    return " or ".join(["a local folder", *(f'"{repo_id}/{file}"' for file in files)])
