"""Float weights rounded to FP8 as they are read, with a scale for each output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nanovllm.checkpoint.quantised.stored_weight import read_part
from nanovllm.checkpoint.weights import Codes, StoredTensor
from nanovllm.fp8 import round_rows
from nanovllm.quantisation import CodeLayout

# Projections of layers; a router decides by small differences and stays as it is.
PROJECTION = re.compile(r"model\.layers\.(\d+)\..*(?<!\.gate)\.weight")


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    floats: StoredTensor  # [outputs, inputs]

    @property
    def shape(self) -> tuple[int, int]:
        return self.floats.shape[0], self.floats.shape[1]

    @property
    def cuts(self) -> tuple[int, int]:
        return 1, 1

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout("fp8", -1)

    def widen(self, rows: slice, columns: slice) -> Tensor:
        part = self.codes_of(rows, columns)
        return part.codes.float().mul_(part.scales)

    def codes_of(self, rows: slice, columns: slice) -> Codes:
        # All inputs of an output share its scale, those of other ranks too.
        whole = round_rows(read_part(self.floats, rows).float())
        return Codes(whole.codes[:, columns], whole.scales, None)


def names_to_round(tensors: Sequence[StoredTensor]) -> set[str]:
    matrices = [tensor.name for tensor in tensors if len(tensor.shape) == 2]
    layers = [int(match[1]) for name in matrices if (match := PROJECTION.fullmatch(name))]
    return {name for name in matrices if is_rounded(name, 1 + max(layers, default=0))}


def is_rounded(name: str, num_layers: int) -> bool:
    """Whether a weight is rounded: the projections of layers, but for the last of the last MLP.

    Nothing but the head comes after it, and alone it would cost more quality than all others
    (benchmarks/engine/quality.py).
    """
    is_last = name == f"model.layers.{num_layers - 1}.mlp.down_proj.weight"
    return not is_last and PROJECTION.fullmatch(name) is not None
