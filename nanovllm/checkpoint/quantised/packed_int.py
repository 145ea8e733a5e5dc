"""The `pack-quantized` format of compressed-tensors: signed numbers, packed along the inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.quantised.stored_weight import Parts, check_part, read_part
from nanovllm.checkpoint.quantised.words import (
    GroupedCodes,
    dequantise,
    group_size,
    groups_in_order,
    input_cut,
    layout_of,
    per_word,
    read_groups,
    unpack,
    words_of,
)
from nanovllm.checkpoint.weights import FLOATS, Codes, StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.quantisation import CodeLayout, Quantisation


@dataclass(frozen=True, slots=True)
class PackedInt:
    shape: tuple[int, int]
    codes: StoredTensor  # [outputs, words of inputs], each number plus half of the range
    scales: StoredTensor  # [outputs, groups]
    zeros: StoredTensor | None  # [words of outputs, groups] likewise, or bytes [outputs, groups]
    group_of: StoredTensor | None  # [inputs]
    quantisation: Quantisation

    @property
    def cuts(self) -> tuple[int, int]:
        has_words = self.zeros is not None and self.zeros.dtype == torch.int32
        rows = per_word(self.quantisation.bits) if has_words else 1
        return rows, input_cut(self.quantisation)

    @property
    def layout(self) -> CodeLayout | None:
        is_in_order = self.group_of is None
        has_zeros = self.zeros is not None
        return layout_of(self.quantisation, self.scales, has_zeros) if is_in_order else None

    def widen(self, rows: slice, columns: slice) -> Tensor:
        return dequantise(self._read(rows, columns))

    def codes_of(self, rows: slice, columns: slice) -> Codes:
        return self._read(rows, columns).as_codes()

    def _read(self, rows: slice, columns: slice) -> GroupedCodes:
        bits, size = self.quantisation.bits, group_size(self.quantisation, self.shape[1])
        codes = unpack(read_part(self.codes, rows, words_of(columns, bits)), bits)
        codes = codes[:, : columns.stop - columns.start]
        groups, group_of = slice(None), None
        if self.group_of is None:
            order = groups_in_order(columns, size)
            groups, group_of = order.groups, order.group_of
        else:
            group_of = read_groups(self.group_of, columns, self.scales.shape[1])
        scales = read_part(self.scales, rows, groups)
        return GroupedCodes(codes, self._read_zeros(rows, groups), scales, group_of)

    def _read_zeros(self, rows: slice, groups: slice) -> Tensor | int:
        """In the range of the codes, which are not negative."""
        bits = self.quantisation.bits
        middle = 1 << (bits - 1)
        if self.zeros is None:
            return middle
        if self.zeros.dtype == torch.int8:
            return read_part(self.zeros, rows, groups).float() + middle
        words = read_part(self.zeros, words_of(rows, bits), groups)  # [words, groups]
        return unpack(words.t(), bits).t()[: rows.stop - rows.start]


def open_packed_int(parts: Parts, quantisation: Quantisation) -> PackedInt:
    codes, scales, count = parts["weight_packed"], parts["weight_scale"], 32 // quantisation.bits
    check_part(parts["weight_shape"], (2,), torch.int64, torch.int32)
    rows, columns = read_part(parts["weight_shape"]).tolist()
    num_groups = -(-columns // group_size(quantisation, max(columns, 1)))
    check_part(codes, (rows, -(-columns // count)), torch.int32)
    check_part(scales, (rows, num_groups), *FLOATS)
    zeros, group_of = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    if zeros is not None and zeros.dtype == torch.int8:
        check_part(zeros, (rows, num_groups), torch.int8)
    elif zeros is not None:
        check_part(zeros, (-(-rows // count), num_groups), torch.int32)
    if group_of is not None:
        check_part(group_of, (columns,), torch.int32, torch.int64)
        group_of = None if bool((read_part(group_of) == -1).all()) else group_of  # not set
    _check_presence(codes, zeros, group_of, quantisation)
    return PackedInt((rows, columns), codes, scales, zeros, group_of, quantisation)


def _check_presence(
    codes: StoredTensor,
    zeros: StoredTensor | None,
    group_of: StoredTensor | None,
    quantisation: Quantisation,
) -> None:
    for name, part, is_needed in (
        ("weight_zero_point", zeros, not quantisation.is_symmetric),
        ("weight_g_idx", group_of, quantisation.desc_act),
    ):
        if part is None and is_needed:
            raise CheckpointError(
                f"{codes.file}: {codes.name!r} needs a {name}, as config.json says"
            )
