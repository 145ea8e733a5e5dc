"""Tensor-parallel shards: the parts of weights that a rank holds and copies from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanovllm.ops.quantized_weight import QuantizedRows
from nanovllm.ops.tp_group import TPGroup


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a dimension: `count` elements, starting at `first`.

    A dimension that does not divide evenly is padded: elements beyond `size` are not in the
    checkpoint.
    """

    size: int  # the whole dimension in the checkpoint
    first: int
    count: int

    def times(self, unit: int) -> Shard:
        """Return the shard in smaller units; `times(head_dim)` converts heads to outputs."""
        return Shard(self.size * unit, self.first * unit, self.count * unit)

    @property
    def stored(self) -> slice:
        """The elements that the checkpoint stores, without padding."""
        return slice(min(self.first, self.size), min(self.first + self.count, self.size))


# Checkpoint name -> this rank's shards of the outputs; one tensor may hold several (q, k and v).
Outputs = dict[str, list[Shard]]


def replicated(size: int) -> Shard:
    return Shard(size, 0, size)


def sharded(size: int, group: TPGroup) -> Shard:
    """Return this rank's shard; all shards have the same count, so the last ones may be padded."""
    count = -(-size // group.size)
    return Shard(size, group.rank * count, count)


def split_kv_heads(num_heads: int, group: TPGroup) -> Shard:
    """Return this rank's kv heads; with more ranks than heads, several ranks share a head."""
    first = group.rank * num_heads // group.size
    return Shard(num_heads, first, max(num_heads // group.size, 1))


Target = Tensor | QuantizedRows


@dataclass(frozen=True, slots=True)
class CopiedPart:
    source: tuple[slice, ...]  # index into the checkpoint tensor; (): all of it
    target: Target


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that the checkpoint must contain, and the parts of it that this rank copies."""

    shape: tuple[int, ...]  # shape in the checkpoint
    parts: tuple[CopiedPart, ...]
    is_quantized: bool = False  # whether the tensor stays quantized

    @property
    def nbytes(self) -> int:
        return sum(part.target.nbytes for part in self.parts)


def expect_replicated(target: Tensor) -> ExpectedTensor:
    return ExpectedTensor(tuple(target.shape), (CopiedPart((), target),))


def expect_shards(target: Target, rows: list[Shard], *columns: Shard) -> ExpectedTensor:
    """Expect a tensor whose rows concatenate several outputs, such as q, k and v.

    This rank copies a shard of each output; the shards fill the target in the same order.
    """
    parts, stored, first = [], 0, 0
    for shard in rows:
        begin, end = shard.stored.start, shard.stored.stop
        source = slice(stored + begin, stored + end), *(column.stored for column in columns)
        parts.append(CopiedPart(source, target[first : first + end - begin]))
        stored, first = stored + shard.size, first + shard.count
    shape = stored, *(column.size for column in columns)
    return ExpectedTensor(shape, tuple(parts), isinstance(target, QuantizedRows))


def expect_stack(target: Target, outputs: Outputs, *columns: Shard) -> dict[str, ExpectedTensor]:
    """Expect one tensor per name; their shards fill the target's rows in the order of `outputs`."""
    tensors, first = {}, 0
    for name, rows in outputs.items():
        tensors[name] = expect_shards(target[first:], rows, *columns)
        first += sum(shard.count for shard in rows)
    return tensors


def num_outputs(outputs: Outputs) -> int:
    """Return the number of outputs that this rank holds."""
    return sum(shard.count for rows in outputs.values() for shard in rows)
