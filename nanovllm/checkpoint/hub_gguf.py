"""Read the header of a GGUF file on the hub, so that a model that cannot run is not fetched."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf import ROPE_FACTORS, read_config
from nanovllm.checkpoint.gguf_file import open_gguf
from nanovllm.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

FIRST_BYTES = 1 << 20  # then twice as many, until the header is there: vocabularies differ in size
MAX_BYTES = 64 << 20

Fetch = Callable[[int, int], int]


def read_hub_config(repo_id: str, revision: str | None, name: str) -> dict[str, Any] | None:
    """Return the metadata of a file that is not cached, in config.json layout.

    None if the file is cached, or if the hub does not give it: the download will say why.
    """
    import httpx
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repo_id, name, revision=revision), str):
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, Path(name).name)
        try:
            reader = _read_header(file, _range_requests(repo_id, revision, name, file))
        except (OSError, httpx.HTTPError):
            return None
        return read_config(Path(repo_id, name), reader)


def _read_header(file: Path, fetch: Fetch) -> GGUFReader:
    """Fetch the beginning of a file; what follows is a hole, as long as the tensors are."""
    start, end = 0, FIRST_BYTES
    while start < MAX_BYTES:
        size = fetch(start, end)
        try:
            reader = open_gguf(file)
        except UnsupportedModelError:
            raise
        except CheckpointError:
            if end >= size:
                raise
        else:
            if reader.data_offset <= end:
                return _with_rope_factors(file, reader, fetch)
        start, end = end, 2 * end
    raise CheckpointError(f"{file.name} has no GGUF header in its first {MAX_BYTES >> 20} MiB")


def _with_rope_factors(file: Path, reader: GGUFReader, fetch: Fetch) -> GGUFReader:
    """They are a tensor, and belong to the config."""
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            fetch(tensor.data_offset, tensor.data_offset + tensor.n_bytes)
            return open_gguf(file)
    return reader


def _range_requests(repo_id: str, revision: str | None, name: str, file: Path) -> Fetch:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    url, headers = hf_hub_url(repo_id, name, revision=revision), build_hf_headers()

    def fetch(start: int, end: int) -> int:
        """Copy these bytes to their place in the local file; return the whole file's size."""
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        response = get_session().get(url, headers=headers | wanted)
        response.raise_for_status()
        size = int(response.headers["Content-Range"].rpartition("/")[2])
        with file.open("r+b" if file.exists() else "wb") as copy:
            copy.truncate(size)
            copy.seek(start)
            copy.write(response.content)
        return size

    return fetch
