"""Some variants of a projection against plain torch, in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.bench.interpreted_variants
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.linear_variants import Shape, Variant, candidates, chosen, library

SHAPES = {
    "summed": Shape(64, 1024, is_summed=True),
    "gated": Shape(128, 512, is_gated=True),
    "plain": Shape(96, 512),
}


def main() -> None:
    torch.manual_seed(0)
    for name, shape in SHAPES.items():
        weight = torch.randn(shape.num_out, shape.num_in, dtype=torch.float16)
        for num_rows in (1, 5):
            x = torch.randn(num_rows, shape.num_in, dtype=torch.float16) / 16
            for variant in variants(shape, num_rows):
                check(variant, x, weight, shape.is_gated)
        print(name)


def variants(shape: Shape, num_rows: int) -> Iterator[Variant]:
    """The interpreter is slow: a few that differ in everything."""
    yield library(shape)
    yield chosen(shape)
    yield from islice(candidates(shape, num_rows, torch.device("cpu")), 1, None, 9)


def check(variant: Variant, x: Tensor, weight: Tensor, is_gated: bool) -> None:
    y = variant.run(x, weight).float()
    total = y if y.dim() == 2 else y.sum(0)
    expected = F.linear(x.float(), weight.float())
    if is_gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    torch.testing.assert_close(total, expected, rtol=2e-2, atol=2e-2, msg=variant.name)


if __name__ == "__main__":
    main()
