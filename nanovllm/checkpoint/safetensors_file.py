"""Read the tensors of a safetensors file."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.stored_tensors import Index, StoredTensor, check_dtype, read_and_release
from nanovllm.checkpoint.tensor_names import split_experts
from nanovllm.errors import CheckpointError


def list_safetensors(path: Path, dtypes: Mapping[str, torch.dtype]) -> Iterator[StoredTensor]:
    mapped = _map_safetensors(path)
    (header_size,) = struct.unpack_from("<Q", mapped)
    first_byte = 8 + header_size
    header: dict[str, Any] = json.loads(mapped[8:first_byte])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        shape, dtype = tuple(entry["shape"]), dtypes.get(entry["dtype"], entry["dtype"])
        check_dtype(path, name, dtype, dtypes)
        offset = first_byte + entry["data_offsets"][0]
        parts = split_experts(name, shape) if ".experts." in name else [(name, shape)]
        for part, part_shape in parts:
            read = partial(_read_mapped, mapped, offset, part_shape, dtype)
            yield StoredTensor(part, part_shape, path, read, dtype=dtype)
            offset += math.prod(part_shape) * dtype.itemsize


def _map_safetensors(path: Path) -> mmap.mmap:
    from safetensors import SafetensorError, safe_open

    try:
        # safe_open validates the file, but reports an unreadable one as missing: open it first.
        with path.open("rb") as file, safe_open(path, framework="pt"):
            # Copy-on-write, because torch warns about read-only memory; nothing writes to it.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _read_mapped(
    mapped: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype, index: Index = ()
) -> Iterator[Tensor]:
    whole = torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=offset)
    yield from read_and_release(whole.view(shape), index)
