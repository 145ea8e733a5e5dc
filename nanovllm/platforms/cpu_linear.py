"""Matrix products on the CPU: F.linear is not the floor, so each weight gets a layout at load.

Which layout is a rule found with benchmarks/cpu_linear.py, not a measurement at load: in bf16 every
kernel rounds differently, and the same batch must get the same answers in every run.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.platforms.base import LinearFn, PackLinear


def choose_linear(dtype: torch.dtype, has_room: bool) -> PackLinear:
    """Return the fastest layout for a dtype; `has_room` allows a second copy of the weights."""
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )
    if dtype != torch.bfloat16 or not has_onednn:
        return pack_columns if dtype == torch.float32 and has_room else pack_rows
    return pack_twice if has_room else pack_onednn


def pack_rows(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Keep the weight as the checkpoint has it, [out, in]."""
    return lambda x: F.linear(x, weight, bias)


def pack_columns(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Store the transpose, [in, out], which streams best through a product with one row."""
    columns = weight.t().contiguous()
    many = pack_rows(weight, bias)

    def run(x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            return many(x)
        return torch.mm(x, columns) if bias is None else torch.addmm(bias, x, columns)

    return run


def pack_onednn(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Store oneDNN's blocked layout, so that it is not rebuilt in every call."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x, packed, bias, "none", [], "")


def pack_twice(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """oneDNN's layout for batches; for one row, columns summed by embedding_bag.

    A product with one row is a sum of columns weighted by x, which is what embedding_bag computes;
    it streams bf16 faster than any matrix kernel, a panel of the outputs per thread.
    """
    many = pack_onednn(weight, bias)
    num_out, num_in = weight.shape
    num_panels = math.gcd(num_out, torch.get_num_threads())
    panels = weight.view(num_panels, -1, num_in).transpose(1, 2)  # [panels, in, out / panels]
    columns = panels.reshape(num_panels * num_in, -1)
    indices = torch.arange(num_panels * num_in)
    offsets = torch.arange(0, num_panels * num_in, num_in)

    def run(x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            return many(x)
        weights = x.expand(num_panels, num_in).reshape(-1)
        bags = torch.embedding_bag(columns, indices, offsets, False, 0, False, weights)
        y = bags[0].view(1, num_out)
        return y if bias is None else y.add_(bias)

    return run
