"""List and remove the models in Hugging Face's cache, by the names that load them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.checkpoint.hub import ALIASES, names_of_gguf
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, DeleteCacheStrategy, HFCacheInfo


@dataclass(frozen=True, slots=True)
class CachedModel:
    model: str  # a repository, or one of its GGUF files: org/name:Q4_K_M or org/name/file.gguf
    num_bytes: int
    last_used: float  # seconds since 1970


def list_models() -> list[CachedModel]:
    models = []
    for cache in _scan():
        [repo] = cache.repos
        sizes: dict[str, dict[Path, int]] = {}
        for (name, *_), file in _named_files(cache):
            # Several revisions may contain the same file, which is stored only once.
            sizes.setdefault(name, {})[file.blob_path] = file.size_on_disk
        for name, size_of in sizes.items():
            models.append(CachedModel(name, sum(size_of.values()), repo.last_accessed))
    return sorted(models, key=lambda each: each.model)


def remove_model(model: str) -> tuple[str, int]:
    """Remove all revisions of a model; return its name and the number of bytes freed."""
    short_name = ALIASES.get(model.lower())
    repo_id, colon, quantization = (short_name.hub_id if short_name else model).partition(":")
    for name in (model, repo_id + colon + quantization.upper()):
        if deletion := _deletion_of(name):
            deletion.execute()
            return name, deletion.expected_freed_size
    raise CheckpointError(
        f"{name!r} is not in the hub cache; `nanovllm models list` shows the models that are"
    )


def _deletion_of(name: str) -> DeleteCacheStrategy | None:
    for cache in _scan():
        [repo] = cache.repos
        if name == repo.repo_id:
            return cache.delete_revisions(*(each.commit_hash for each in repo.revisions))
        if files := [file for names, file in _named_files(cache) if name in names]:
            return cache.delete_files(*files)
    return None


def _scan() -> Iterator[HFCacheInfo]:
    """Yield a cache info for each model: revisions of two models may have the same hash."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in cache.repos:
        if repo.repo_type == "model":
            yield replace(cache, repos=frozenset({repo}))


def _named_files(cache: HFCacheInfo) -> Iterator[tuple[list[str], CachedFileInfo]]:
    """Yield each file with the names that load its model; users see the first name."""
    [repo] = cache.repos
    for revision in repo.revisions:
        names = names_of_gguf(repo.repo_id, revision.snapshot_path)
        for file in revision.files:
            path = file.file_path.relative_to(revision.snapshot_path).as_posix()
            own_name = [f"{repo.repo_id}/{path}"] if path.endswith(".gguf") else []
            yield [names.get(path, repo.repo_id), *own_name], file
