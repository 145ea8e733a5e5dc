"""What a rank holds of a tensor that its group shares, and how a checkpoint's tensors fill it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.distributed.group import TPGroup
from nanovllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a dimension that a rank holds; what lies past the whole is padding."""

    size: int  # of the whole
    first: int
    count: int

    def times(self, unit: int) -> Share:
        """The same share, of a dimension with `unit` elements for each of this one's."""
        return Share(self.size * unit, self.first * unit, self.count * unit)

    @property
    def stored(self) -> slice:
        """The place of what is not padding."""
        return slice(min(self.first, self.size), min(self.first + self.count, self.size))


def whole(size: int) -> Share:
    return Share(size, 0, size)


def split(size: int, group: TPGroup) -> Share:
    """Equal parts; the last are padded where the size does not divide."""
    count = -(-size // group.size)
    return Share(size, group.rank * count, count)


def split_kv_heads(num_heads: int, group: TPGroup) -> Share:
    """Equal parts; ranks that outnumber the heads hold one each, some of them the same one."""
    first = group.rank * num_heads // group.size
    return Share(num_heads, first, max(num_heads // group.size, 1))


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
class WeightPart:
    index: tuple[slice, ...]  # of the stored tensor
    view: Tensor  # what it is copied into


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of one of a checkpoint's tensors."""

    shape: tuple[int, ...]  # as it is stored
    parts: tuple[WeightPart, ...]  # what this rank takes of it

    @property
    def nbytes(self) -> int:
        return sum(part.view.nbytes for part in self.parts)


def whole_slot(view: Tensor) -> WeightSlot:
    return WeightSlot(tuple(view.shape), (WeightPart((), view),))


def shared_slot(view: Tensor, rows: list[Share], *columns: Share) -> WeightSlot:
    """Fill a view with its shares of the rows of a tensor, which stores one whole after another."""
    parts, stored, first = [], 0, 0
    for share in rows:
        begin, end = share.stored.start, share.stored.stop
        index = slice(stored + begin, stored + end), *(column.stored for column in columns)
        parts.append(WeightPart(index, view[first : first + end - begin]))
        stored, first = stored + share.size, first + share.count
    return WeightSlot((stored, *(column.size for column in columns)), tuple(parts))
