"""The weights of a quantised checkpoint as if they were stored in float32, one for each module.

A weight whose stored parts the model names itself is left as it is: what reads them is then the
layer's weight format, which a device with a kernel for them chooses.
"""

from __future__ import annotations

from collections.abc import Collection

from nanovllm.checkpoint.quantised.awq import open_awq
from nanovllm.checkpoint.quantised.fp8_block import open_fp8_block
from nanovllm.checkpoint.quantised.fp8_scaled import open_fp8_scaled
from nanovllm.checkpoint.quantised.gptq import open_gptq
from nanovllm.checkpoint.quantised.packed_int import open_packed_int
from nanovllm.checkpoint.quantised.round_to_fp8 import RoundedWeight, names_to_round
from nanovllm.checkpoint.quantised.stored_weight import Format, as_tensor, read_part
from nanovllm.checkpoint.weights import FLOATS, StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.quantisation import Quantisation

PACKED = Format(
    ("weight_packed", "weight_scale", "weight_shape"),
    open_packed_int,
    ("weight_zero_point", "weight_g_idx"),
)
# By method and scheme.
FORMATS = {
    ("fp8", "fp8_block"): Format(("weight", "weight_scale_inv"), open_fp8_block),
    ("fp8", "fp8_scaled"): Format(("weight", "weight_scale"), open_fp8_scaled),
    ("compressed-tensors", "fp8_block"): Format(("weight", "weight_scale"), open_fp8_block),
    ("compressed-tensors", "fp8_scaled"): Format(("weight", "weight_scale"), open_fp8_scaled),
    ("compressed-tensors", "packed_int"): PACKED,
    ("awq", "awq"): Format(("qweight", "qzeros", "scales"), open_awq),
    ("gptq", "gptq"): Format(("qweight", "qzeros", "scales"), open_gptq, ("g_idx",)),
}


def widen_all(
    tensors: list[StoredTensor], quantisation: Quantisation, expected: Collection[str]
) -> list[StoredTensor]:
    """Put one tensor in place of the parts of each quantised weight."""
    if quantisation.scheme == "round_to_fp8":
        names = names_to_round(tensors)
        return [
            as_tensor(tensor.name, tensor.file, RoundedWeight(tensor))
            if tensor.name in names
            else tensor
            for tensor in tensors
        ]
    stored_format = FORMATS[quantisation.method, quantisation.scheme]
    modules, others = _by_module(tensors, stored_format, expected)
    widened = []
    for module, parts in modules.items():
        if _is_plain(parts):
            others += parts.values()
        else:
            widened.append(_open(module, parts, stored_format, quantisation))
    return widened + [tensor for tensor in others if not _is_empty_bias(tensor, expected)]


Modules = dict[str, dict[str, StoredTensor]]


def _by_module(
    tensors: list[StoredTensor], stored_format: Format, expected: Collection[str]
) -> tuple[Modules, list[StoredTensor]]:
    """Return the parts of weights by module, and what is none: second copies too."""
    modules: Modules = {}
    others = []
    names = (*stored_format.names, *stored_format.optional)
    for tensor in tensors:
        module, _, name = tensor.name.rpartition(".")
        is_kept = f"{module}.{stored_format.names[1]}" in expected  # as the model names its scales
        if name not in names or is_kept or name in modules.get(module, {}):
            others.append(tensor)
        else:
            modules.setdefault(module, {})[name] = tensor
    return modules, others


def _is_plain(parts: dict[str, StoredTensor]) -> bool:
    return parts.keys() == {"weight"} and parts["weight"].dtype in FLOATS


def _open(
    module: str,
    parts: dict[str, StoredTensor],
    stored_format: Format,
    quantisation: Quantisation,
) -> StoredTensor:
    file = next(iter(parts.values())).file
    if missing := [name for name in stored_format.names if name not in parts]:
        raise CheckpointError(
            f"{file}: {module} is quantised and has no tensor {', '.join(missing)}"
        )
    if quantisation.ignores(module):
        raise CheckpointError(
            f"{file}: {module} is quantised, and quantization_config in config.json says it is not"
        )
    return as_tensor(f"{module}.weight", file, stored_format.open(parts, quantisation))


def _is_empty_bias(tensor: StoredTensor, expected: Collection[str]) -> bool:
    """Whether it is a bias of zeros for a projection without: early GPTQ tools wrote them."""
    is_extra = tensor.name.endswith(".bias") and tensor.name not in expected
    return is_extra and (0 in tensor.shape or not bool(read_part(tensor).any()))
