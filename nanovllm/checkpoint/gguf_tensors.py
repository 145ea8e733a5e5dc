"""Read the tensors of a GGUF file under their Hugging Face names and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.checkpoint.gguf import BLOCK_TYPES, ROPE_FACTORS, Metadata, known_name
from nanovllm.checkpoint.gguf_architectures import ARCHITECTURES
from nanovllm.checkpoint.gguf_file import open_gguf, release_pages, to_float
from nanovllm.checkpoint.stored_tensors import Index, StoredTensor
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader

PIECE_ELEMENTS = 4 << 20  # elements read at a time: 16 MB as float32


def list_gguf(path: Path) -> Iterator[StoredTensor]:
    """List the tensors; those whose rows are permuted within heads must be read in whole heads."""
    metadata = Metadata.of(path, open_gguf(path, has_lists=False))
    architecture = ARCHITECTURES[metadata.architecture]
    heads = metadata.number("attention.head_count")
    num_heads = {"attn_q": heads, "attn_k": metadata.number("attention.head_count_kv", heads)}
    num_layers = metadata.number("block_count") - metadata.number("nextn_predict_layers", 0)
    for tensor in metadata.reader.tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        if tensor.name == ROPE_FACTORS or (layer and int(layer[1]) >= num_layers):
            continue
        if (name := known_name(tensor, architecture)) is None:
            raise CheckpointError(f"{path}: {architecture.hf_class} has no tensor {tensor.name}")
        part = tensor.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        shape = tuple(map(int, reversed(tensor.shape)))
        heads = num_heads[part] if part in architecture.permuted else None
        has_offset = part.endswith("norm") and part != "ssm_norm"
        offset = architecture.norm_offset if has_offset else 0.0
        is_stacked = "*" in name  # one tensor holds this projection of all experts
        shape = shape[1:] if is_stacked else shape
        matrices = tensor.data if is_stacked else [tensor.data]
        if part == "ssm_conv1d":
            shape = shape[0], 1, shape[1]
        elif part == "ffn_gate_inp_shexp" and len(shape) == 1:
            shape, matrices = (1, *shape), [tensor.data[None]]
        for expert, data in enumerate(matrices):
            read = partial(_read, metadata.reader, data, shape=shape, num_heads=heads)
            floats = partial(read, kind=tensor.tensor_type, offset=offset, is_decay=part == "ssm_a")
            is_quantized = tensor.tensor_type.name in BLOCK_TYPES
            blocks = partial(read, kind=None) if is_quantized else None
            yield StoredTensor(name.replace("*", str(expert)), shape, path, floats, blocks)


def _read(
    reader: GGUFReader,
    data: npt.NDArray[Any],
    index: Index = (),
    *,
    kind: GGMLQuantizationType | None,
    shape: tuple[int, ...],
    num_heads: int | None,
    offset: float = 0.0,
    is_decay: bool = False,
) -> Iterator[Tensor]:
    """Yield rows piece by piece, in whole heads if rows are permuted within heads.

    Rows are dequantized from type `kind`, or copied as stored if `kind` is None. `offset` is
    subtracted. Decays, which are stored as -exp(A_log), are converted to A_log.
    """
    if len(shape) == 1 and kind is not None:  # a vector is one row: dequantize it as a whole
        data, kind = to_float(data, kind), type(kind).F32
    step = 1 if num_heads is None else shape[0] // num_heads
    num_rows = max(PIECE_ELEMENTS // math.prod(shape[1:]) // step, 1) * step
    row_slice, *columns = index or (slice(None),)
    begin, end, _ = row_slice.indices(shape[0])
    for first in range(begin, end, num_rows):
        rows = data[first : min(first + num_rows, end)]
        array = np.array(rows) if kind is None else to_float(rows, kind)
        release_pages(reader)
        if offset:
            array -= offset
        if is_decay:
            array = np.log(-array)
        if num_heads is not None:
            array = _unpermute(array, len(array) // step)
        index = (slice(None), *columns)
        yield torch.from_numpy(array if kind is None else array.reshape(-1, *shape[1:]))[index]


def _unpermute(array: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorder each head's rows from the stored order (pair, half) to (half, pair)."""
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(array.shape)
