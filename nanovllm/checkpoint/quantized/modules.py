"""Combine the tensors of each quantized weight, such as qweight and scales, into one.

FP8 weights have one scale per block, per output channel, or per tensor. Dense weights can be
quantized to FP8 while they are read, with one scale per output channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from nanovllm.checkpoint.quantization import Quantization, QuantLayout
from nanovllm.checkpoint.quantized.integers import open_awq, open_gptq, open_packed
from nanovllm.checkpoint.quantized.weight import (
    Parts,
    QuantizedPiece,
    StoredWeight,
    check_matrix,
    check_part,
    in_groups,
    read_part,
)
from nanovllm.checkpoint.stored_tensors import FLOATS, StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.ops.fp8 import FP8, quantize_rows

PER_CHANNEL = QuantLayout("fp8", -1)
# Matches the projections of layers, but neither routers (quantizing them could change the chosen
# experts) nor other gates, which are too small to matter.
PROJECTION = re.compile(
    r"model\.layers\.(\d+)\.(?!linear_attn\.in_proj_(?:a|b|ba)\.).*(?<![._]gate)\.weight"
)


def open_fp8_block(parts: Parts, quantization: Quantization) -> StoredWeight:
    assert quantization.block_size is not None
    block_rows, block_columns = quantization.block_size
    values, scales = parts["weight"], parts.get("weight_scale_inv") or parts["weight_scale"]
    shape = check_matrix(values, FP8)
    num_blocks = -(-shape[0] // block_rows), -(-shape[1] // block_columns)
    check_part(scales, num_blocks, *FLOATS)

    def read(rows: slice, columns: slice) -> QuantizedPiece:
        part = read_part(values, rows, columns)
        blocks = slice(rows.start // block_rows, -(-rows.stop // block_rows))
        groups, group_of = in_groups(columns, block_columns)
        by_output = read_part(scales, blocks, groups).float().repeat_interleave(block_rows, 0)
        return QuantizedPiece(part, by_output[: len(part)], group_of=group_of)

    layout = QuantLayout("fp8", block_columns)
    return StoredWeight(shape, (block_rows, block_columns), layout, read)


def open_fp8_scaled(parts: Parts, quantization: Quantization) -> StoredWeight:
    values, scales = parts["weight"], parts["weight_scale"]
    shape = check_matrix(values, FP8)
    known = ((), (1,), (shape[0],))
    check_part(scales, scales.shape if scales.shape in known else (shape[0], 1), *FLOATS)
    is_single = scales.shape in ((), (1,))

    def read(rows: slice, columns: slice) -> QuantizedPiece:
        part = read_part(values, rows, columns)
        by_output = read_part(scales) if is_single else read_part(scales, rows)
        return QuantizedPiece(part, by_output.float().view(-1, 1).expand(len(part), 1))

    return StoredWeight(shape, (1, 1), PER_CHANNEL, read)


@dataclass(frozen=True, slots=True)
class StoredFormat:
    open: Callable[[Parts, Quantization], StoredWeight]  # raises KeyError if a part is missing
    parts: tuple[str, ...]  # names of the tensors that a module may have


FORMATS = {
    "fp8_block": StoredFormat(open_fp8_block, ("weight", "weight_scale_inv", "weight_scale")),
    "fp8_scaled": StoredFormat(open_fp8_scaled, ("weight", "weight_scale")),
    "packed_int": StoredFormat(
        open_packed,
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    ),
    "awq": StoredFormat(open_awq, ("qweight", "qzeros", "scales")),
    "gptq": StoredFormat(open_gptq, ("qweight", "qzeros", "scales", "g_idx")),
}


def combine_parts(
    tensors: list[StoredTensor], quantization: Quantization, expected: Collection[str]
) -> list[StoredTensor]:
    """Combine the tensors of each quantized weight into one, which is read lazily.

    `expected` names the tensors that the model has; biases of zeros not among them are dropped.
    With `round_to_fp8`, there is nothing to combine, and dense projections are quantized instead.
    """
    if quantization.scheme == "round_to_fp8":
        names = names_to_quantize(tensors)
        return [quantize_to_fp8(tensor) if tensor.name in names else tensor for tensor in tensors]
    stored_format = FORMATS[quantization.scheme]
    modules: dict[str, dict[str, StoredTensor]] = {}
    combined, others = [], []
    for tensor in tensors:
        module, _, name = tensor.name.rpartition(".")
        is_duplicate = name in modules.get(module, {})
        if name not in stored_format.parts or is_duplicate:
            others.append(tensor)
        else:
            modules.setdefault(module, {})[name] = tensor
    for module, parts in modules.items():
        if parts.keys() == {"weight"} and parts["weight"].dtype in FLOATS:
            others += parts.values()
        else:
            combined.append(_open(module, parts, stored_format, quantization))
    return combined + [tensor for tensor in others if not _is_empty_bias(tensor, expected)]


def _open(
    module: str, parts: Parts, stored_format: StoredFormat, quantization: Quantization
) -> StoredTensor:
    file = next(iter(parts.values())).file
    try:
        weight = stored_format.open(parts, quantization)
    except KeyError as error:
        raise CheckpointError(
            f"{file}: {module} is quantized and has no tensor {error.args[0]}; fetch it again"
        ) from error
    return weight.as_tensor(f"{module}.weight", file)


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
    return StoredWeight(shape, (1, 1), PER_CHANNEL, read).as_tensor(tensor.name, tensor.file)


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
