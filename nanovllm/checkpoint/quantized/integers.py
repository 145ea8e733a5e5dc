"""Integers of 4 or 8 bits packed into 32-bit words: AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.checkpoint.quantization import Quantization, QuantLayout
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

# AWQ interleaves the eight outputs of a word: output i is at position AWQ_POSITIONS[i], where
# position 0 is the lowest four bits.
AWQ_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]


def open_awq(parts: Parts, quantization: Quantization) -> StoredWeight:
    """Open an AWQ weight: outputs are packed, [inputs, words]; zero points are [groups, words]."""
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    num_inputs, num_words = check_matrix(qweight, torch.int32)
    num_outputs, size = 8 * num_words, _group_size(quantization, num_inputs)
    num_groups = -(-num_inputs // size)
    check_part(qzeros, (num_groups, num_words), torch.int32)
    check_part(scales, (num_groups, num_outputs), *FLOATS)

    def read(rows: slice, columns: slice) -> QuantizedPiece:
        words = _words_of(rows, 4)
        groups, group_of = in_groups(columns, size)
        return QuantizedPiece(
            _unpack_awq(read_part(qweight, columns, words)),
            read_part(scales, groups, rows).t(),
            _unpack_awq(read_part(qzeros, groups, words)),
            group_of,
        )

    alignment = 8, _input_alignment(quantization)
    layout = _layout(quantization, scales, has_zeros=True)
    return StoredWeight((num_outputs, num_inputs), alignment, layout, read)


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack [n, words] to [8 * words, n]."""
    by_output = words.t().contiguous()
    values = torch.empty(len(by_output), 8, len(words), dtype=torch.uint8)
    for i, position in enumerate(AWQ_POSITIONS):
        values[:, i] = (by_output >> 4 * position) & 15
    return values.flatten(0, 1)


def open_gptq(parts: Parts, quantization: Quantization) -> StoredWeight:
    """Open a GPTQ weight: inputs are packed, [words, outputs]; zero points are [groups, words]."""
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    num_words, num_outputs = check_matrix(qweight, torch.int32)
    bits, per_word = quantization.bits, 32 // quantization.bits
    num_inputs = num_words * per_word
    size = _group_size(quantization, num_inputs)
    num_groups = -(-num_inputs // size)
    check_part(qzeros, (num_groups, -(-num_outputs // per_word)), torch.int32)
    check_part(scales, (num_groups, num_outputs), *FLOATS)
    stored_groups = parts["g_idx"] if quantization.desc_act else parts.get("g_idx")
    g_idx = _read_groups(stored_groups, num_inputs, size)
    offset = 0 if _holds_middles(qzeros, num_outputs, quantization) else quantization.zero_offset

    def read(rows: slice, columns: slice) -> QuantizedPiece:
        groups, group_of = in_groups(columns, size, g_idx)
        zeros = _gptq_zeros(read_part(qzeros, groups, _words_of(rows, bits)), offset, quantization)
        return QuantizedPiece(
            _unpack(read_part(qweight, _words_of(columns, bits), rows).t(), bits),
            read_part(scales, groups, rows).t(),
            zeros.t()[: rows.stop - rows.start],
            group_of,
        )

    alignment = per_word, _input_alignment(quantization)
    layout = _layout(quantization, scales, has_zeros=True) if g_idx is None else None
    return StoredWeight((num_outputs, num_inputs), alignment, layout, read)


def _gptq_zeros(words: Tensor, offset: int, quantization: Quantization) -> Tensor:
    bits = quantization.bits
    if quantization.zeros_carry:
        words += sum(offset << bits * position for position in range(32 // bits))
        return _unpack(words, bits)
    # Version 1 of the format stores a zero point of 0 as the largest integer.
    return (_unpack(words, bits) + offset) & ((1 << bits) - 1)


def _holds_middles(qzeros: StoredTensor, num_outputs: int, quantization: Quantization) -> bool:
    """Return whether symmetric weights store their zero points without the format's offset.

    Some tools omit the offset although they declare version 1 of the format, which requires it.
    """
    if not quantization.is_symmetric or quantization.zero_offset == 0:
        return False
    stored = _unpack(read_part(qzeros), quantization.bits)[:, :num_outputs]
    return bool((stored == 1 << (quantization.bits - 1)).all())


def open_packed(parts: Parts, quantization: Quantization) -> StoredWeight:
    """Open a compressed-tensors weight: inputs are packed, [outputs, words].

    Zero points are packed along the outputs, [words, groups], or stored as bytes
    [outputs, groups]. Packed integers are unsigned: half of their range has been added to them.
    """
    packed, scales, bits = parts["weight_packed"], parts["weight_scale"], quantization.bits
    check_part(parts["weight_shape"], (2,), torch.int64, torch.int32)
    num_outputs, num_inputs = read_part(parts["weight_shape"]).tolist()
    size, per_word = _group_size(quantization, num_inputs), 32 // bits
    num_groups = -(-num_inputs // size)
    check_part(packed, (num_outputs, -(-num_inputs // per_word)), torch.int32)
    check_part(scales, (num_outputs, num_groups), *FLOATS)
    middle, name = 1 << (bits - 1), "weight_zero_point"
    zeros = parts.get(name) if quantization.is_symmetric else parts[name]
    has_bytes = zeros is not None and zeros.dtype == torch.int8
    if zeros is not None:
        num_rows = num_outputs if has_bytes else -(-num_outputs // per_word)
        check_part(zeros, (num_rows, num_groups), torch.int8 if has_bytes else torch.int32)
    name = "weight_g_idx"
    stored_groups = parts[name] if quantization.desc_act else parts.get(name)
    g_idx = _read_groups(stored_groups, num_inputs, size)

    def read_zeros(rows: slice, groups: slice) -> Tensor | int:
        if zeros is None:
            return middle
        if has_bytes:
            return (read_part(zeros, rows, groups).int() + middle).to(torch.uint8)
        words = read_part(zeros, _words_of(rows, bits), groups)
        return _unpack(words.t(), bits).t()[: rows.stop - rows.start]

    def read(rows: slice, columns: slice) -> QuantizedPiece:
        groups, group_of = in_groups(columns, size, g_idx)
        values = _unpack(read_part(packed, rows, _words_of(columns, bits)), bits)
        values = values[:, : columns.stop - columns.start]
        stored_scales = read_part(scales, rows, groups)
        return QuantizedPiece(values, stored_scales, read_zeros(rows, groups), group_of)

    alignment = 1 if zeros is None or has_bytes else per_word, _input_alignment(quantization)
    layout = _layout(quantization, scales, zeros is not None) if g_idx is None else None
    return StoredWeight((num_outputs, num_inputs), alignment, layout, read)


def _read_groups(tensor: StoredTensor | None, num_inputs: int, size: int) -> Tensor | None:
    """Read the group of each input; return None if groups are consecutive, or all are -1."""
    if tensor is None:
        return None
    check_part(tensor, (num_inputs,), torch.int32, torch.int64)
    groups, num_groups = read_part(tensor).long(), -(-num_inputs // size)
    if torch.equal(groups, torch.arange(num_inputs) // size) or bool((groups == -1).all()):
        return None
    if bool(((groups < 0) | (groups >= num_groups)).any()):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} must hold group indices below {num_groups}"
        )
    return groups


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack [..., words] to [..., integers], one per byte, lowest bits first."""
    # Always copy: a tensor with one column counts as contiguous, whatever the stride of its rows.
    values = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return values
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)


def _words_of(values: slice, bits: int) -> slice:
    count = 32 // bits
    return slice(values.start // count, -(-values.stop // count))


def _group_size(quantization: Quantization, num_inputs: int) -> int:
    return max(num_inputs, 1) if quantization.group_size == -1 else quantization.group_size


def _input_alignment(quantization: Quantization) -> int:
    """Return the alignment of input slices: whole words and, without act-order, groups."""
    has_groups = quantization.group_size != -1 and not quantization.desc_act
    count = 32 // quantization.bits
    return math.lcm(quantization.group_size, count) if has_groups else count


def _layout(
    quantization: Quantization, scales: StoredTensor, has_zeros: bool
) -> QuantLayout | None:
    """Return the layout of 4-bit integers in consecutive groups; None for other widths."""
    if quantization.bits != 4:
        return None
    dtype = str(scales.dtype).removeprefix("torch.")
    scale_dtype = dtype if dtype in ("float16", "bfloat16") else "float32"
    return QuantLayout("int4", quantization.group_size, has_zeros, scale_dtype)
