"""A StepPlan as bytes: its columns as they lie in memory, behind their lengths, then what is rare.

What is decoded are views of the message, but for the rows that enter.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from nanovllm.engine.step import BlockCopy, BlockUpdate, StepPlan

Section = bytes | memoryview

# Decode tokens, rows; lengths of block updates, released slots, block copies, masked rows.
_HEADER = struct.Struct("<6q")


def encode_plan(plan: StepPlan) -> list[Section]:
    """Return the sections of a message; joined they are what `decode_plan` takes."""
    updates = [number for u in plan.block_updates for number in (u.slot, u.index, u.block_id)]
    copies = [number for copy in plan.block_copies for number in (copy.source, copy.target)]
    lists = (updates, plan.released, copies)
    lengths = (len(plan.slots), *map(len, lists), len(plan.masked_rows))
    return [
        _HEADER.pack(plan.num_decode_tokens, *lengths),
        *(column.data for column in (plan.slots, plan.starts, plan.counts, plan.num_logits)),
        *map(_column, lists),
        plan.masked_rows.data,
        pickle.dumps(plan.new_rows, pickle.HIGHEST_PROTOCOL) if plan.new_rows else b"",
    ]


def decode_plan(message: bytes | bytearray) -> StepPlan:
    """Read a plan whose arrays are views of the message, which must not change afterwards."""
    num_decode_tokens, num_rows, *lengths = _HEADER.unpack_from(message)
    lengths = [num_rows] * 4 + lengths
    numbers = np.frombuffer(message, np.int32, sum(lengths), _HEADER.size)
    pairs = zip(lengths, accumulate(lengths), strict=True)
    columns = [numbers[end - length : end] for length, end in pairs]
    slots, starts, counts, num_logits, updates, released, copies, masked_rows = columns
    new_rows = memoryview(message)[_HEADER.size + numbers.nbytes :]
    return StepPlan(
        slots=slots,
        starts=starts,
        counts=counts,
        num_logits=num_logits,
        new_rows=pickle.loads(new_rows) if new_rows else [],
        block_updates=[BlockUpdate(*numbers) for numbers in updates.reshape(-1, 3).tolist()],
        released=released.tolist(),
        num_decode_tokens=num_decode_tokens,
        masked_rows=masked_rows,
        block_copies=[BlockCopy(*numbers) for numbers in copies.reshape(-1, 2).tolist()],
    )


def _column(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, np.int32).tobytes()
