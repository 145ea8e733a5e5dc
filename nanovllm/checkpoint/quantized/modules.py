"""The weights of a quantized checkpoint: one tensor in place of the parts of each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from nanovllm.checkpoint.quantized.float8 import (
    names_to_quantize,
    open_fp8_block,
    open_fp8_scaled,
    quantize_to_fp8,
)
from nanovllm.checkpoint.quantized.integers import open_awq, open_gptq, open_packed
from nanovllm.checkpoint.quantized.weight import Parts, StoredWeight, read_part
from nanovllm.checkpoint.weights import FLOATS, StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.quantisation import Quantisation


@dataclass(frozen=True, slots=True)
class Format:
    """The parts of a module's weight, and what reads them."""

    names: tuple[str, ...]
    open: Callable[[Parts, Quantisation], StoredWeight]
    optional: tuple[str, ...] = ()


SCALED = Format(("weight", "weight_scale"), open_fp8_scaled)
# By method and scheme.
FORMATS = {
    ("fp8", "fp8_block"): Format(("weight", "weight_scale_inv"), open_fp8_block),
    ("fp8", "fp8_scaled"): SCALED,
    ("compressed-tensors", "fp8_block"): Format(("weight", "weight_scale"), open_fp8_block),
    ("compressed-tensors", "fp8_scaled"): SCALED,
    ("compressed-tensors", "packed_int"): Format(
        ("weight_packed", "weight_scale", "weight_shape"),
        open_packed,
        ("weight_zero_point", "weight_g_idx"),
    ),
    ("awq", "awq"): Format(("qweight", "qzeros", "scales"), open_awq),
    ("gptq", "gptq"): Format(("qweight", "qzeros", "scales"), open_gptq, ("g_idx",)),
}


def join_parts(
    tensors: list[StoredTensor], quantisation: Quantisation, expected: Collection[str]
) -> list[StoredTensor]:
    """Put one tensor in place of the parts of each quantized weight."""
    if quantisation.scheme == "round_to_fp8":
        names = names_to_quantize(tensors)
        return [quantize_to_fp8(tensor) if tensor.name in names else tensor for tensor in tensors]
    stored_format = FORMATS[quantisation.method, quantisation.scheme]
    known = (*stored_format.names, *stored_format.optional)
    modules: dict[str, dict[str, StoredTensor]] = {}
    joined, others = [], []
    for tensor in tensors:
        module, _, name = tensor.name.rpartition(".")
        if name not in known or name in modules.get(module, {}):  # a second copy is no part
            others.append(tensor)
        else:
            modules.setdefault(module, {})[name] = tensor
    for module, parts in modules.items():
        if parts.keys() == {"weight"} and parts["weight"].dtype in FLOATS:
            others += parts.values()
        else:
            joined.append(_open(module, parts, stored_format, quantisation))
    return joined + [tensor for tensor in others if not _is_empty_bias(tensor, expected)]


def _open(
    module: str,
    parts: dict[str, StoredTensor],
    stored_format: Format,
    quantisation: Quantisation,
) -> StoredTensor:
    file = next(iter(parts.values())).file
    if missing := [name for name in stored_format.names if name not in parts]:
        raise CheckpointError(
            f"{file}: {module} is quantized and has no tensor {', '.join(missing)}"
        )
    if quantisation.ignores(module):
        raise CheckpointError(
            f"{file}: {module} is quantized, and quantization_config in config.json says it is not"
        )
    return stored_format.open(parts, quantisation).as_tensor(f"{module}.weight", file)


def _is_empty_bias(tensor: StoredTensor, expected: Collection[str]) -> bool:
    """Whether it is a bias of zeros for a projection without: early GPTQ tools wrote them."""
    is_extra = tensor.name.endswith(".bias") and tensor.name not in expected
    return is_extra and (0 in tensor.shape or not bool(read_part(tensor).any()))
