"""List the tensors of a checkpoint from the headers of its files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from nanovllm.checkpoint.bin_file import list_bin
from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.gguf_tensors import list_gguf
from nanovllm.checkpoint.safetensors_file import list_safetensors
from nanovllm.checkpoint.stored_tensors import StoredTensor
from nanovllm.checkpoint.tensor_names import causal_lm_tensors

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Additional dtypes, accepted only in quantized checkpoints.
_QUANTIZED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
# Prefixes of the tensor names of a text model that was saved with its LM head.
_CAUSAL_LM_PREFIXES = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def list_weights(checkpoint: Checkpoint, expected: Collection[str] = ()) -> list[StoredTensor]:
    """List the tensors, with those of each quantized weight combined into one.

    `expected` names the tensors that the model has; biases of zeros not among them are dropped.
    """
    tensors, quantization = list_tensors(checkpoint), checkpoint.quantization
    if quantization is None:
        return tensors
    from nanovllm.checkpoint.quantized.combine import combine_parts

    return combine_parts(tensors, quantization, expected)


def list_tensors(checkpoint: Checkpoint) -> list[StoredTensor]:
    """List the tensors; FP8 and integers are accepted only if the checkpoint is quantized."""
    dtypes = _DTYPES | (_QUANTIZED_DTYPES if checkpoint.is_quantized else {})
    files = checkpoint.weight_files
    tensors = [tensor for file in files for tensor in _list_file(file, dtypes)]
    is_causal_lm = all(tensor.name.startswith(_CAUSAL_LM_PREFIXES) for tensor in tensors)
    return tensors if is_causal_lm else causal_lm_tensors(tensors)


def _list_file(file: Path, dtypes: Mapping[str, torch.dtype]) -> Iterator[StoredTensor]:
    if file.suffix == ".gguf":
        return list_gguf(file)
    return (list_bin if file.suffix == ".bin" else list_safetensors)(file, dtypes)
