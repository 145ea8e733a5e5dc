"""The models in Hugging Face's cache: listed and removed by the names that load them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.checkpoint.hub import parse_name, quantization_of
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, HFCacheInfo


@dataclass(frozen=True, slots=True)
class CachedModel:
    model: str  # a repository, or one of its GGUF files: org/name:Q4_K_M or org/name/file.gguf
    num_bytes: int
    last_used: str


def list_models() -> list[CachedModel]:
    models = []
    for cache in _scan():
        for name, files in _files_by_name(cache).items():
            sizes = {file.blob_path: file.size_on_disk for file in files}  # revisions share them
            [repo] = cache.repos
            models.append(CachedModel(name, sum(sizes.values()), repo.last_accessed_str))
    return sorted(models, key=lambda each: each.model)


def remove_model(model: str) -> tuple[str, int]:
    """Remove a model, in all its revisions; return its name and the number of bytes freed."""
    repo_id, quantization, file = parse_name(model)
    name = f"{repo_id}:{quantization.upper()}" if quantization else repo_id
    name = f"{repo_id}/{file}" if file else name
    for cache in _scan(repo_id):
        [repo] = cache.repos
        if name == repo_id:
            deletion = cache.delete_revisions(*(each.commit_hash for each in repo.revisions))
        elif files := _files_by_name(cache).get(name):
            deletion = cache.delete_files(*files)
        else:
            break
        deletion.execute()
        return name, deletion.expected_freed_size
    raise CheckpointError(
        f"{name!r} is not in the hub cache; `nanovllm models list` shows the models that are"
    )


def _scan(repo_id: str | None = None) -> Iterator[HFCacheInfo]:
    """Yield the cache of each model alone: copies of a repository have the same revisions."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in cache.repos:
        if repo.repo_type == "model" and repo_id in (None, repo.repo_id):
            yield replace(cache, repos=frozenset({repo}))


def _files_by_name(cache: HFCacheInfo) -> dict[str, list[CachedFileInfo]]:
    """Return the files of a repository by the name of the model to which they belong."""
    [repo] = cache.repos
    names: dict[str, list[CachedFileInfo]] = {}
    for revision in repo.revisions:
        for file in revision.files:
            name, path = repo.repo_id, file.file_path.relative_to(revision.snapshot_path).as_posix()
            if path.endswith(".gguf"):
                name += f":{kind}" if (kind := quantization_of(path)) else f"/{path}"
            names.setdefault(name, []).append(file)
    return names
