"""Matrix products on the CPU: F.linear is not the floor, so each weight gets a layout at load."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.platforms.base import LinearFn, PackLinear


def choose_linear(weight: Tensor) -> PackLinear:
    """Return the layout that benchmarks/cpu_linear.py found fastest for this kind of weight.

    A rule, not a measurement at load: in bf16 every layout rounds differently, and the same prompt
    must get the same answer in every run.
    """
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )
    if weight.dtype == torch.bfloat16 and has_onednn:
        return pack_onednn
    return pack_rows


def pack_rows(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Keep the weight as the checkpoint has it, [out, in]."""
    return lambda x: F.linear(x, weight, bias)


def pack_columns(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Store the transpose, [in, out]."""
    columns = weight.t().contiguous()
    if bias is None:
        return lambda x: torch.mm(x, columns)
    return lambda x: torch.addmm(bias, x, columns)


def pack_onednn(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Store oneDNN's blocked layout, so that it is not rebuilt in every call."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x, packed, bias, "none", [], "")
