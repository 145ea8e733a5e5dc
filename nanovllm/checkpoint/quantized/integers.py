"""Integers of 4 or 8 bits that are packed into 32-bit words: AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.quantized.checks import (
    BITS,
    choose,
    read_group_size,
    read_names,
    unsupported,
)
from nanovllm.checkpoint.quantized.weight_format import Parts, Quantization, QuantLayout

if TYPE_CHECKING:
    from nanovllm.checkpoint.stored_tensors import StoredTensor


@dataclass(frozen=True, slots=True)
class Packing:
    """The names of a weight's tensors, and how words hold its integers."""

    values: str
    scales: str
    zeros: str  # packed along the outputs
    g_idx: str = ""  # group of each input
    shape: str = ""  # numbers of outputs and inputs
    # If set, words hold several outputs, output i of a word at positions[i]; else several inputs.
    positions: tuple[int, ...] = ()
    is_transposed: bool = True  # whether matrices are [inputs, outputs]
    # Whether symmetric weights may lack zero points, and zero points may be signed bytes.
    has_optional_zeros: bool = False


AWQ = Packing("qweight", "scales", "qzeros", positions=(0, 4, 1, 5, 2, 6, 3, 7))
GPTQ = Packing("qweight", "scales", "qzeros", "g_idx")
# Half of their range has been added to the integers.
COMPRESSED = Packing(
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    is_transposed=False,
    has_optional_zeros=True,
)


@dataclass(frozen=True, slots=True)
class Integers:
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

    def open(self, parts: Parts) -> StoredTensor:
        from nanovllm.checkpoint.quantized.open_integers import open_integers

        return open_integers(self, parts)


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
