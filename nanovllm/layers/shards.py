"""Tensor-parallel shares: which part of a weight a rank holds, and what it copies from where."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.errors import ConfigError
from nanovllm.ops.quantized_weight import QuantizedRows
from nanovllm.ops.tp_group import TPGroup


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a dimension: `count` elements from `first` on.

    A dimension that does not divide is padded: elements from `size` on are not in the checkpoint.
    """

    size: int  # of the whole dimension, as a checkpoint stores it
    first: int
    count: int

    def times(self, unit: int) -> Shard:
        """The same share in smaller units: a share of heads, times head_dim, is one of outputs."""
        return Shard(self.size * unit, self.first * unit, self.count * unit)

    @property
    def stored(self) -> slice:
        """The elements that are not padding."""
        return slice(min(self.first, self.size), min(self.first + self.count, self.size))


def whole(size: int) -> Shard:
    return Shard(size, 0, size)


def split(size: int, group: TPGroup) -> Shard:
    """Equal parts; the last are padded where the size does not divide."""
    count = -(-size // group.size)
    return Shard(size, group.rank * count, count)


def split_kv_heads(num_heads: int, group: TPGroup) -> Shard:
    """Equal parts; ranks that outnumber the heads hold one each, some of them the same one."""
    first = group.rank * num_heads // group.size
    return Shard(num_heads, first, max(num_heads // group.size, 1))


def check_splits(model: ModelConfig, size: int) -> None:
    """Refuse sizes that do not divide by the number of ranks, by name."""
    dense = model.experts is None or model.experts.dense_layers
    sizes = {
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size if dense else 0,
        "the experts' intermediate size": 0 if model.experts is None else model.experts.size,
        # More ranks than kv heads share them, if that comes out even.
        "num_key_value_heads": model.num_kv_heads if size % model.num_kv_heads else 0,
    }
    if problems := [f"{name}={number}" for name, number in sizes.items() if number % size]:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide this model's {', '.join(problems)}"
        )


@dataclass(frozen=True, slots=True)
class CopiedPart:
    source: tuple[slice, ...]  # of the stored tensor; (): all of it
    target: Tensor | QuantizedRows


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that a checkpoint must have, and the parts of it that this rank copies."""

    shape: tuple[int, ...]  # as it is stored
    parts: tuple[CopiedPart, ...]
    is_blocks: bool = False  # whether the parts are bytes of GGUF's quant blocks, not elements

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor stays quantized."""
        return self.is_blocks or isinstance(self.parts[0].target, QuantizedRows)

    @property
    def nbytes(self) -> int:
        return sum(part.target.nbytes for part in self.parts)


def expect_whole(target: Tensor) -> ExpectedTensor:
    return ExpectedTensor(tuple(target.shape), (CopiedPart((), target),))


def expect_shards(target: Tensor, rows: list[Shard], *columns: Shard) -> ExpectedTensor:
    """Expect a tensor whose rows are several dimensions, one below another: take a share of each.

    The shares fill the target in the same order.
    """
    parts, stored, first = [], 0, 0
    for share in rows:
        begin, end = share.stored.start, share.stored.stop
        source = slice(stored + begin, stored + end), *(column.stored for column in columns)
        parts.append(CopiedPart(source, target[first : first + end - begin]))
        stored, first = stored + share.size, first + share.count
    return ExpectedTensor((stored, *(column.size for column in columns)), tuple(parts))


def expect_stack(
    target: Tensor, outputs: dict[str, list[Shard]], *columns: Shard
) -> dict[str, ExpectedTensor]:
    """Expect a tensor for each name; their shares fill the target one below another."""
    tensors, first = {}, 0
    for name, rows in outputs.items():
        tensors[name] = expect_shards(target[first:], rows, *columns)
        first += sum(share.count for share in rows)
    return tensors


def num_outputs(outputs: dict[str, list[Shard]]) -> int:
    """How many this rank has of them all."""
    return sum(share.count for rows in outputs.values() for share in rows)
