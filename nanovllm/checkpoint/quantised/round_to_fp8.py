"""Float weights rounded to FP8 as they are read, with a scale for each output."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from nanovllm.checkpoint.quantised.stored_weight import read_part
from nanovllm.checkpoint.weights import Codes, StoredTensor
from nanovllm.fp8 import round_rows
from nanovllm.quantisation import CodeLayout

# Projections of layers; a router decides by small differences and stays as it is.
PROJECTION = re.compile(r"model\.layers\..*(?<!\.gate)\.weight")


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


def is_projection(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and PROJECTION.fullmatch(tensor.name) is not None
