"""Matrix products on the CPU: F.linear is far from the memory floor, and which layout wins depends
on shape and dtype, so each shape is measured once at load."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.platforms.base import LinearFn, PackLinear

SMALL = 1 << 16  # weights below this many elements are not worth a measurement
NUM_ROWS_MEASURED = (1, 16)  # one request's decode, and a batch's


def choose_linear(weights: list[Tensor]) -> PackLinear:
    """Return the layout with the best product of times over `weights`, all of one shape."""
    if weights[0].numel() < SMALL:
        return pack_rows
    return min(_layouts(weights[0].dtype), key=lambda pack: _cost(pack, weights))


def pack_rows(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Keep the weight as the checkpoint has it: [out, in]."""
    return lambda x: F.linear(x, weight, bias)


def pack_columns(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Store the transpose, [in, out]: a product with one row then streams through memory."""
    columns = weight.t().contiguous()
    if bias is None:
        return lambda x: torch.mm(x, columns)
    return lambda x: torch.addmm(bias, x, columns)


def pack_onednn(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Store oneDNN's blocked layout, so that it is not rebuilt in every call."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), NUM_ROWS_MEASURED[-1])
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x, packed, bias, "none", [], "")


def _layouts(dtype: torch.dtype) -> list[PackLinear]:
    layouts: list[PackLinear] = [pack_rows, pack_columns]
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        layouts.append(pack_onednn)
    return layouts


def _cost(pack: PackLinear, weights: list[Tensor]) -> float:
    linears = [pack(weight, None) for weight in weights]
    cost = 1.0
    for num_rows in NUM_ROWS_MEASURED:
        x = torch.ones(num_rows, weights[0].shape[1], dtype=weights[0].dtype)
        cost *= min(_time(linears, x) for _ in range(4))
    return cost


def _time(linears: list[LinearFn], x: Tensor) -> float:
    start = time.perf_counter()
    for linear in linears:
        linear(x)
    return time.perf_counter() - start
