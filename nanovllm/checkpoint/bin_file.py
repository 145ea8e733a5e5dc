"""Read the tensors of a PyTorch checkpoint file, such as pytorch_model.bin."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.checkpoint.stored_tensors import (
    StoredTensor,
    check_dtype,
    read_and_release,
    split_rows,
)
from nanovllm.errors import CheckpointError


def list_bin(path: Path, dtypes: Mapping[str, torch.dtype]) -> Iterator[StoredTensor]:
    try:
        is_zip = _is_zip(path)  # files older than torch 1.6 cannot be memory-mapped
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{path} is not a readable PyTorch checkpoint: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        # Torch's own message advises to load the file with weights_only=False, which is unsafe.
        raise CheckpointError(
            f"{path} is not a readable PyTorch checkpoint ({type(error).__name__}): it is damaged, "
            "or holds more than tensors; fetch it again, or use the model's safetensors files"
        ) from None
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path} must hold a state dict, not a {type(tensors).__name__}")
    for name, tensor in tensors.items():
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        is_plain = is_dense and not tensor.is_nested and tensor.device.type == "cpu"
        if not isinstance(name, str) or not is_plain:
            raise CheckpointError(f"{path}: {name!r:.80} is not the name of a dense CPU tensor")
        check_dtype(path, name, tensor.dtype, dtypes)
        read = partial(read_and_release if is_zip else split_rows, tensor)
        yield StoredTensor(name, tuple(tensor.shape), path, read, dtype=tensor.dtype)


def _is_zip(path: Path) -> bool:
    """Return whether torch reads the file as a ZIP archive; raise if its members are compressed."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":
            return False
    with zipfile.ZipFile(path) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise CheckpointError("its members are compressed, which torch.save never does")
    return True
