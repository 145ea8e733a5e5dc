"""Integers of 4 or 8 bits that are packed into 32-bit words: AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.quantized.checks import (
    BITS,
    FLOATS,
    check_matrix,
    check_part,
    choose,
    read_group_size,
    read_names,
    unsupported,
)
from nanovllm.checkpoint.quantized.weight_format import Parts, Quantization, QuantLayout

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.checkpoint.quantized.weight import StoredMatrix
    from nanovllm.checkpoint.stored_tensors import StoredTensor


@dataclass(frozen=True, slots=True)
class Packing:
    """The names of a weight's tensors, and how words hold its integers."""

    values: str
    scales: str
    zeros: str  # zero points, packed along the output dimension
    g_idx: str = ""  # group of each input
    shape: str = ""  # numbers of outputs and inputs; if unset, matrices are [inputs, outputs]
    # If set, words hold several outputs, output i of a word at positions[i]; else several inputs.
    positions: tuple[int, ...] = ()
    # Whether symmetric weights may lack zero points, and zero points may be signed bytes.
    has_optional_zeros: bool = False


AWQ = Packing("qweight", "scales", "qzeros", positions=(0, 4, 1, 5, 2, 6, 3, 7))
GPTQ = Packing("qweight", "scales", "qzeros", "g_idx")
# Half of their range has been added to the integers.
COMPRESSED = Packing(
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    has_optional_zeros=True,
)


@dataclass(frozen=True, slots=True)
class Integers:
    """The settings of a format of packed integers."""

    packing: Packing
    bits: int
    group_size: int  # number of inputs per scale; -1: one scale per output channel
    is_symmetric: bool = True
    # Act-order: inputs are grouped by activation importance, so a group is not contiguous (g_idx).
    desc_act: bool = False
    zero_offset: int = 0  # number to add to the stored zero points
    # Whether the offset is added to whole words, with carries from one zero point to the next.
    zeros_carry: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        packing = self.packing
        names = packing.values, packing.scales, packing.zeros, packing.g_idx, packing.shape
        return tuple(filter(None, names))

    @property
    def layout(self) -> QuantLayout | None:
        if self.bits != 4 or self.desc_act:
            return None
        if self.packing.has_optional_zeros:
            return QuantLayout("int4", self.group_size, not self.is_symmetric, "bfloat16")
        return QuantLayout("int4", self.group_size, True, "float16")

    def open(self, parts: Parts) -> list[StoredTensor]:
        from nanovllm.checkpoint.quantized import weight
        from nanovllm.ops.quantized_weight import QuantizedPiece

        packing, per_word = self.packing, 32 // self.bits
        unit = (per_word, 1) if packing.positions else (1, per_word)  # outputs, inputs of a word
        if packing.shape:
            check_part(parts[packing.shape], (2,), "int64", "int32")
            num_outputs, num_inputs = weight.read_part(parts[packing.shape]).tolist()
        else:
            rows, columns = check_matrix(parts[packing.values], "int32")  # of words
            num_outputs, num_inputs = columns * unit[0], rows * unit[1]
        size = max(num_inputs, 1) if self.group_size == -1 else self.group_size
        shape, scale_shape = (num_outputs, num_inputs), (num_outputs, -(-num_inputs // size))
        values = self._open_matrix(parts[packing.values], shape, unit, "int32")
        scales = self._open_matrix(parts[packing.scales], scale_shape, (1, 1), *FLOATS)
        zeros = self._open_zeros(parts, scale_shape)
        g_idx = parts[packing.g_idx] if self.desc_act else parts.get(packing.g_idx)
        group_of_input = None if g_idx is None else weight.read_groups(g_idx, num_inputs, size)

        def read(outputs: slice, inputs: slice) -> QuantizedPiece:
            groups, group_of = weight.in_groups(inputs, size)
            if group_of_input is not None:
                groups, group_of = slice(0, scale_shape[1]), group_of_input[inputs]
            zero = zeros if isinstance(zeros, int) else zeros.read(outputs, groups)
            integers, scale = values.read(outputs, inputs), scales.read(outputs, groups)
            return QuantizedPiece(integers, scale, zero, group_of)

        layout, alignment = self.layout, per_word
        if group_of_input is not None:
            layout = None
        elif self.group_size != -1:
            alignment = math.lcm(per_word, size)
        if layout is not None:
            dtype = scales.tensor.dtype_name
            dtype = dtype if dtype in ("float16", "bfloat16") else "float32"
            layout = replace(layout, has_zeros=not isinstance(zeros, int), scale_dtype=dtype)
        return [weight.quantized_tensor(values.tensor, shape, (per_word, alignment), layout, read)]

    def _open_zeros(self, parts: Parts, shape: tuple[int, int]) -> StoredMatrix | int:
        """Return the zero points, which are packed along the outputs, or the one of all groups."""
        name, middle = self.packing.zeros, 1 << (self.bits - 1)
        is_optional = self.packing.has_optional_zeros
        tensor = parts.get(name) if is_optional and self.is_symmetric else parts[name]
        if tensor is None:
            return middle
        if is_optional and tensor.dtype_name == "int8":
            zeros = self._open_matrix(tensor, shape, (1, 1), "int8")
            return replace(zeros, convert=lambda stored: (stored.int() + middle).byte())
        zeros = self._open_matrix(tensor, shape, (32 // self.bits, 1), "int32")
        # Some tools omit the offset of symmetric weights, although they declare version 1 of GPTQ.
        if self.zero_offset and not (self.is_symmetric and zeros.holds_only(middle, shape)):
            zeros = replace(zeros, convert=self._add_offset)
        return zeros

    def _add_offset(self, words: Tensor) -> Tensor:
        offsets = sum(self.zero_offset << first for first in range(0, 32, self.bits))
        if self.zeros_carry:
            return words + offsets
        # Without carries: version 1 of GPTQ stores a zero point of 0 as the largest integer.
        low = offsets * ((1 << (self.bits - 1)) - 1)  # all bits but each integer's highest
        return ((words & low) + offsets) ^ (words & ~low)

    def _open_matrix(
        self, tensor: StoredTensor, shape: tuple[int, int], per_word: tuple[int, int], *dtypes: str
    ) -> StoredMatrix:
        from nanovllm.checkpoint.quantized.weight import StoredMatrix

        order = 1 if self.packing.shape else -1
        stored_shape = -(-shape[0] // per_word[0]), -(-shape[1] // per_word[1])
        check_part(tensor, stored_shape[::order], *dtypes)
        return StoredMatrix(tensor, order, per_word, self.packing.positions)


def read_awq(stored: Mapping[str, Any]) -> Quantization:
    choose(stored, "version", "gemm", "gemm", "GEMM")
    choose(stored, "zero_point", True, True)
    bits, group_size = choose(stored, "bits", 4, 4), read_group_size(stored)
    ignored = read_names(stored.get("modules_to_not_convert"))
    return Quantization("awq", Integers(AWQ, bits, group_size, is_symmetric=False), ignored)


def read_gptq(stored: Mapping[str, Any]) -> Quantization:
    choose(stored, "is_marlin_format", False, False)
    choose(stored, "pack_dtype", "int32", "int32")
    version = stored.get("format") or "gptq"
    version = choose(stored, "checkpoint_format", version, "gptq", "gptq_v2")
    if stored.get("dynamic"):
        raise unsupported("dynamic (other settings for some modules)")
    # GPTQModel subtracts the offset from whole words, not from each zero point.
    quantizer = str((stored.get("meta") or {}).get("quantizer"))
    integers = Integers(
        GPTQ,
        bits=choose(stored, "bits", None, *BITS),
        group_size=read_group_size(stored),
        is_symmetric=choose(stored, "sym", True, True, False),
        desc_act=choose(stored, "desc_act", False, True, False),
        zero_offset=1 if version == "gptq" else 0,  # version 1 stores zero points minus one
        zeros_carry="gptqmodel:" in quantizer,
    )
    return Quantization("gptq", integers, read_names(stored.get("modules_to_not_convert")))


def read_packed(weights: Mapping[str, Any]) -> Integers:
    """Read the settings of compressed-tensors."""
    choose(weights, "type", None, "int")
    orders = None, "weight", "static", "group", "dynamic", False, True
    order = choose(weights, "actorder", None, *orders)
    is_grouped = choose(weights, "strategy", None, "channel", "group") == "group"
    return Integers(
        COMPRESSED,
        bits=choose(weights, "num_bits", None, *BITS),
        group_size=read_group_size(weights) if is_grouped else -1,
        is_symmetric=choose(weights, "symmetric", True, True, False),
        desc_act=order in ("group", "dynamic", True),  # only these store the group of each input
    )
