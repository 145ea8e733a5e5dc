"""A StepPlan and a StepResult as bytes: arrays as they lie in memory, behind their lengths.

Every section is a multiple of four bytes long, so that what is decoded are views of the message.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from nanovllm.engine.step import (
    BlockCopy,
    BlockUpdate,
    IntColumn,
    NewRow,
    Pooling,
    StepPlan,
    StepResult,
)
from nanovllm.sampling_params import SamplingParams

Section = bytes | memoryview

# Decode tokens; lengths of the columns, block updates, released slots, block copies, masked rows,
# parameters.
_PLAN = struct.Struct("<7q")
# Slot, prompt tokens, seed; numbers of tokens, blocks and stop tokens.
_NEW_ROW = struct.Struct("<6q")
_LENGTH = struct.Struct("<q")
_ARRAY_NAMES = tuple(field.name for field in fields(StepResult) if field.name != "failures")
_PARAM_NAMES = tuple(field.name for field in fields(SamplingParams))


def encode_plan(plan: StepPlan) -> list[Section]:
    """Return the sections of a message; joined they are what `decode_plan` takes."""
    updates = [number for u in plan.block_updates for number in (u.slot, u.index, u.block_id)]
    params = _encode_params(plan.new_rows)
    copies = [number for copy in plan.block_copies for number in (copy.source, copy.target)]
    masked_rows, lists = plan.masked_rows, (updates, plan.released, copies)
    lengths = (len(plan.slots), *map(len, lists), len(masked_rows), len(params))
    return [
        _PLAN.pack(plan.num_decode_tokens, *lengths),
        *(column.data for column in (plan.slots, plan.starts, plan.counts, plan.num_logits)),
        _column(updates),
        _column(plan.released),
        _column(copies),
        masked_rows.data,
        params,
        *(section for row in plan.new_rows for section in _encode_new_row(row)),
    ]


def decode_plan(message: bytes | bytearray) -> StepPlan:
    """Read a plan whose arrays are views of the message, which must not change afterwards."""
    reader = _Reader(message)
    num_decode_tokens, num_rows, *lengths, num_bytes = reader.header(_PLAN)
    slots, starts, counts, num_logits = (reader.column(num_rows) for _ in range(4))
    updates, released, copies, masked_rows = (reader.column(length) for length in lengths)
    params = _decode_params(reader.column(num_bytes // 4).tobytes())
    return StepPlan(
        slots=slots,
        starts=starts,
        counts=counts,
        num_logits=num_logits,
        new_rows=[_decode_new_row(reader, *asked) for asked in params],
        block_updates=[BlockUpdate(*numbers) for numbers in updates.reshape(-1, 3).tolist()],
        released=released.tolist(),
        num_decode_tokens=num_decode_tokens,
        masked_rows=masked_rows,
        block_copies=[BlockCopy(*numbers) for numbers in copies.reshape(-1, 2).tolist()],
    )


def encode_result(result: StepResult) -> list[Section]:
    """Return a header with the name, type and shape of every array, then the arrays."""
    fields = [(name, getattr(result, name)) for name in _ARRAY_NAMES]
    arrays = {name: np.ascontiguousarray(field) for name, field in fields if field is not None}
    shapes = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    failures = None if result.failures is None else list(result.failures.items())
    header = _padded(json.dumps((shapes, failures)))
    return [_LENGTH.pack(len(header)), header, *(array.data for array in arrays.values())]


def decode_result(message: bytes | bytearray) -> StepResult:
    (length,) = _LENGTH.unpack_from(message)
    arrays, offset = {}, _LENGTH.size + length
    shapes, failures = json.loads(message[_LENGTH.size : offset])
    for name, dtype, shape in shapes:
        array = np.frombuffer(message, dtype, math.prod(shape), offset).reshape(shape)
        arrays[name] = array
        offset += array.nbytes
    return StepResult(**arrays, failures=None if failures is None else dict(failures))


class _Reader:
    """Takes a message apart from front to back."""

    def __init__(self, message: bytes | bytearray) -> None:
        self._message = message
        self._offset = 0

    def header(self, layout: struct.Struct) -> tuple[int, ...]:
        values = layout.unpack_from(self._message, self._offset)
        self._offset += layout.size
        return values

    def column(self, length: int) -> IntColumn:
        column = np.frombuffer(self._message, np.int32, length, self._offset)
        self._offset += column.nbytes
        return column


def _encode_new_row(row: NewRow) -> list[Section]:
    stop_token_ids = sorted(row.stop_token_ids)
    lengths = (len(row.token_ids), len(row.block_ids), len(stop_token_ids))
    header = _NEW_ROW.pack(row.slot, row.num_prompt_tokens, row.seed, *lengths)
    return [header, row.token_ids.data, _column(row.block_ids), _column(stop_token_ids)]


def _decode_new_row(
    reader: _Reader,
    params: SamplingParams,
    bad_words: tuple[tuple[int, ...], ...],
    pooling: Pooling | None,
) -> NewRow:
    slot, num_prompt_tokens, seed, *lengths = reader.header(_NEW_ROW)
    token_ids, block_ids, stop_token_ids = (reader.column(length) for length in lengths)
    stop_ids = frozenset(stop_token_ids.tolist())
    others = block_ids.tolist(), num_prompt_tokens, params, seed, stop_ids, bad_words, pooling
    return NewRow(slot, token_ids, *others)


def _encode_params(rows: list[NewRow]) -> bytes:
    if not rows:
        return b""
    asked = [
        (row.bad_words, row.pooling, [getattr(row.params, name) for name in _PARAM_NAMES])
        for row in rows
    ]
    return _padded(json.dumps(asked))


def _decode_params(
    text: bytes,
) -> list[tuple[SamplingParams, tuple[tuple[int, ...], ...], Pooling | None]]:
    asked = json.loads(text) if text else []
    return [
        (SamplingParams(*values), tuple(map(tuple, words)), pooling)
        for words, pooling, values in asked
    ]


def _padded(text: str) -> bytes:
    """JSON, which may end in spaces."""
    return text.encode().ljust(-(-len(text) // 4) * 4)


def _column(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, np.int32).tobytes()
