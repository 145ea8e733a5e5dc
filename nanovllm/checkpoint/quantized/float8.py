"""FP8 weights: with a scale for each block of outputs and inputs, for each output, or for all.

Also dense weights that are quantized to FP8 while they are read, with a scale for each output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nanovllm.checkpoint.quantized.weight import (
    GroupedValues,
    Parts,
    StoredWeight,
    check_matrix,
    check_part,
    in_groups,
    read_part,
)
from nanovllm.checkpoint.weights import FLOATS, StoredTensor
from nanovllm.fp8 import FP8, round_rows
from nanovllm.quantisation import Quantisation, QuantLayout

BY_OUTPUT = QuantLayout("fp8", -1)
# Projections of layers; a router decides by small differences and stays as it is.
PROJECTION = re.compile(r"model\.layers\.(\d+)\..*(?<!\.gate)\.weight")


def open_fp8_block(parts: Parts, quantisation: Quantisation) -> StoredWeight:
    assert quantisation.block_size is not None
    high, wide = quantisation.block_size
    values = parts["weight"]
    [scales] = (part for name, part in parts.items() if name != "weight")
    shape = check_matrix(values, FP8)
    check_part(scales, (-(-shape[0] // high), -(-shape[1] // wide)), *FLOATS)

    def read(rows: slice, columns: slice) -> GroupedValues:
        part = read_part(values, rows, columns)
        blocks = slice(rows.start // high, -(-rows.stop // high))
        groups, group_of = in_groups(columns, wide)
        by_output = read_part(scales, blocks, groups).float().repeat_interleave(high, 0)
        return GroupedValues(part, by_output[: len(part)], group_of=group_of)

    return StoredWeight(shape, (high, wide), QuantLayout("fp8", wide), read)


def open_fp8_scaled(parts: Parts, quantisation: Quantisation) -> StoredWeight:
    values, scales = parts["weight"], parts["weight_scale"]
    shape = check_matrix(values, FP8)
    known = ((), (1,), (shape[0],))
    check_part(scales, scales.shape if scales.shape in known else (shape[0], 1), *FLOATS)
    is_single = scales.shape in ((), (1,))

    def read(rows: slice, columns: slice) -> GroupedValues:
        part = read_part(values, rows, columns)
        by_output = read_part(scales) if is_single else read_part(scales, rows)
        return GroupedValues(part, by_output.float().view(-1, 1).expand(len(part), 1))

    return StoredWeight(shape, (1, 1), BY_OUTPUT, read)


def quantize_to_fp8(tensor: StoredTensor) -> StoredTensor:
    """Quantize a dense weight while it is read."""

    def read(rows: slice, columns: slice) -> GroupedValues:
        # All inputs of an output share its scale, those of other ranks too.
        whole = round_rows(read_part(tensor, rows).float())
        return GroupedValues(whole.codes[:, columns], whole.scales)

    shape = tensor.shape[0], tensor.shape[1]
    return StoredWeight(shape, (1, 1), BY_OUTPUT, read).as_tensor(tensor.name, tensor.file)


def names_to_quantize(tensors: Sequence[StoredTensor]) -> set[str]:
    matrices = [tensor.name for tensor in tensors if len(tensor.shape) == 2]
    layers = [int(match[1]) for name in matrices if (match := PROJECTION.fullmatch(name))]
    return {name for name in matrices if is_quantized_to_fp8(name, 1 + max(layers, default=0))}


def is_quantized_to_fp8(name: str, num_layers: int) -> bool:
    """Whether a weight is quantized: the projections of layers, but for the last of the last MLP.

    Nothing but the head comes after it, and alone it would cost more quality than all others
    (benchmarks/engine/quality.py).
    """
    is_last = name == f"model.layers.{num_layers - 1}.mlp.down_proj.weight"
    return not is_last and PROJECTION.fullmatch(name) is not None
