"""Projections in plain torch, also of quantized weights and in dtypes that the CPU emulates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.composed_linear import ComposedLinear
from nanovllm.ops.interface import Activation, Ops
from nanovllm.ops.quantized_weight import QuantizedWeight, Weight

# Number of weight elements upcast at a time: enough for a fast GEMM, small compared with any model.
PIECE_SIZE = 1 << 21
# Up to this many rows, a GEMM in the dtype itself is faster than upcasting, even if the CPU only
# emulates the dtype (benchmarks/engine/cpu_choices.py).
MAX_NARROW_ROWS = {torch.float16: 4, torch.bfloat16: 0}


def compose_linear(
    ops: Ops,
    weight: Weight,
    bias: Tensor | None,
    activation: Activation | None,
    matmul_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> ComposedLinear:
    """Return the reference projection, which dequantizes a quantized weight in every call."""

    def run(x: Tensor) -> Tensor:
        if isinstance(weight, Tensor):
            return linear(x, weight, bias, matmul_dtype, out_dtype)
        assert isinstance(weight, QuantizedWeight)
        return linear(x, weight.dequantize(x.dtype), bias, None, out_dtype)

    return ComposedLinear(ops, run, activation)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute F.linear in the dtype of x or, if x has more than a few rows, in `dtype`.

    This is for CPUs that only emulate the dtype of x. The weight is upcast piece by piece. If the
    result has another `out_dtype`, the product is always computed in that dtype.
    """
    if out_dtype is not None and out_dtype != x.dtype:
        dtype = out_dtype
    elif dtype is None or dtype == x.dtype or len(x) <= MAX_NARROW_ROWS[x.dtype]:
        return F.linear(x, weight, bias)
    num_out, num_in = weight.shape
    wide = x.to(dtype)
    y = x.new_empty(len(x), num_out, dtype=out_dtype)
    num_rows = max(PIECE_SIZE // max(num_in, 1), 1)
    for first in range(0, num_out, num_rows):
        part = slice(first, first + num_rows)
        part_bias = None if bias is None else bias[part].to(dtype)
        y[:, part] = F.linear(wide, weight[part].to(dtype), part_bias)
    return y
