"""Combine the tensors of each quantized weight, such as qweight and scales, into one.

Dense weights can be quantized to FP8 while they are read, with one scale per output channel.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from nanovllm.checkpoint.quantized.checks import FLOATS
from nanovllm.checkpoint.quantized.weight import quantized_tensor, read_part
from nanovllm.checkpoint.quantized.weight_format import Quantization, RoundToFp8, WeightFormat
from nanovllm.checkpoint.stored_tensors import StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.ops.fp8 import quantize_rows
from nanovllm.ops.quantized_weight import QuantizedPiece

# Matches the projections of layers, but neither routers (quantizing them could change the chosen
# experts) nor other gates, which are too small to matter.
PROJECTION = re.compile(
    r"model\.layers\.(\d+)\.(?!linear_attn\.in_proj_(?:a|b|ba)\.).*(?<![._]gate)\.weight"
)


def combine_parts(
    tensors: list[StoredTensor], quantization: Quantization, expected: Collection[str]
) -> list[StoredTensor]:
    """Combine the tensors of each quantized weight into one, which is read lazily.

    `expected` names the tensors that the model has; biases of zeros not among them are dropped.
    With `RoundToFp8`, there is nothing to combine, and dense projections are quantized instead.
    """
    weight_format = quantization.format
    if isinstance(weight_format, RoundToFp8):
        names = names_to_quantize(tensors)
        return [quantize_to_fp8(tensor) if tensor.name in names else tensor for tensor in tensors]
    modules: dict[str, dict[str, StoredTensor]] = {}
    combined, others = list[StoredTensor](), list[StoredTensor]()
    for tensor in tensors:
        module, _, name = tensor.name.rpartition(".")
        if name in weight_format.parts and name not in modules.get(module, ()):
            modules.setdefault(module, {})[name] = tensor
        else:
            others.append(tensor)
    for module, parts in modules.items():
        if parts.keys() == {"weight"} and parts["weight"].dtype_name in FLOATS:
            others += parts.values()
        else:
            combined += _open(module, parts, weight_format)
    return combined + [tensor for tensor in others if not _is_empty_bias(tensor, expected)]


def _open(
    module: str, parts: dict[str, StoredTensor], weight_format: WeightFormat
) -> list[StoredTensor]:
    try:
        return weight_format.open(parts)
    except KeyError as error:
        file = next(iter(parts.values())).file
        raise CheckpointError(
            f"{file}: {module} is quantized and has no tensor {error.args[0]}; fetch it again"
        ) from error


def _is_empty_bias(tensor: StoredTensor, expected: Collection[str]) -> bool:
    """Return whether this is an unexpected bias of zeros, which early GPTQ tools wrote."""
    is_extra = tensor.name.endswith(".bias") and tensor.name not in expected
    return is_extra and (0 in tensor.shape or not bool(read_part(tensor).any()))


def quantize_to_fp8(tensor: StoredTensor) -> StoredTensor:
    """Quantize a dense weight while it is read."""

    def read(rows: slice, columns: slice) -> QuantizedPiece:
        # The scale of an output channel covers all inputs, including those of other ranks.
        whole = quantize_rows(read_part(tensor, rows).float())
        return QuantizedPiece(whole.values[:, columns], whole.scales)

    shape = tensor.shape[0], tensor.shape[1]
    return quantized_tensor(tensor, shape, (1, 1), RoundToFp8().layout, read)


def names_to_quantize(tensors: Sequence[StoredTensor]) -> set[str]:
    matrices = [tensor.name for tensor in tensors if len(tensor.shape) == 2]
    layers = [int(match[1]) for name in matrices if (match := PROJECTION.fullmatch(name))]
    return {name for name in matrices if is_quantized_to_fp8(name, 1 + max(layers, default=0))}


def is_quantized_to_fp8(name: str, num_layers: int) -> bool:
    """Return whether a weight is quantized: a layer's projection, but not the last mlp.down_proj.

    Only the final norm and the LM head follow this down_proj. Quantizing it would cost more quality
    than quantizing all other projections together (benchmarks/engine/quality.py).
    """
    is_last = name == f"model.layers.{num_layers - 1}.mlp.down_proj.weight"
    return not is_last and PROJECTION.fullmatch(name) is not None
