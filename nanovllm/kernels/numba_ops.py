"""Ops on the CPU: compiled kernels, and torch's oneDNN for products with many rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import numba_kernels as kernels
from nanovllm.kernels.base import (
    Activation,
    LinearFn,
    NormWeights,
    PackedLinear,
    QKNormWeights,
)
from nanovllm.kernels.composed_linear import ComposedLinear
from nanovllm.kernels.numba_launch import Launcher, float_bits

# More rows than that and oneDNN's blocked product is faster: benchmarks/cpu_linear.py.
MAX_LINEAR_ROWS = {torch.bfloat16: 8, torch.float32: 16}


class NumbaOps:
    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.max_linear_rows = MAX_LINEAR_ROWS[launcher.dtype]
        self._launch, self._empty = launcher.launch, launcher.empty

    def embed(self, token_ids: Tensor, table: Tensor, scale: float) -> Tensor:
        num_rows, dim = len(token_ids), table.shape[1]
        out = self._empty(num_rows, dim)
        addresses = out.data_ptr(), table.data_ptr(), token_ids.data_ptr()
        self._launch(kernels.EMBED, *addresses, num_rows, dim, float_bits(scale))
        return out

    def norm(
        self, x: Tensor | None, residual: Tensor | None, norm: NormWeights
    ) -> tuple[Tensor, Tensor]:
        assert x is not None  # ComposedLinear never leaves it out
        num_rows, dim = x.shape
        weight, eps = norm.weight.data_ptr(), float_bits(norm.eps)
        if residual is None:
            out = self._empty(num_rows, dim)
            addresses = out.data_ptr(), x.data_ptr(), weight
            self._launch(kernels.NORM, *addresses, eps, num_rows, dim)
            return out, x
        addresses = x.data_ptr(), residual.data_ptr(), weight
        self._launch(kernels.ADD_NORM, *addresses, eps, num_rows, dim)
        return x, residual

    def rope_write(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        rope: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_slots: Tensor,
    ) -> None:
        num_tokens, per_token, head_dim = qkv.shape
        num_kv_heads = k_cache.shape[2]
        self._launch(
            kernels.ROPE_WRITE,
            qkv.data_ptr(),
            rope.data_ptr(),
            0 if norm is None else norm.q.data_ptr(),
            0 if norm is None else norm.k.data_ptr(),
            0 if norm is None else float_bits(norm.eps),
            positions.data_ptr(),
            kv_slots.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            num_tokens,
            per_token - 2 * num_kv_heads,
            num_kv_heads,
            head_dim,
        )

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty(num_rows, size)
        kernel = kernels.SILU_MUL if activation == "silu" else kernels.GELU_MUL
        self._launch(kernel, out.data_ptr(), gate_up.data_ptr(), num_rows, size)
        return out

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        weight = weight.contiguous()
        run_many = pack_onednn(weight, bias) if has_room else pack_rows(weight, bias)
        num_out, num_in = weight.shape
        max_rows = self.max_linear_rows
        num_threads = self.launcher.num_threads
        bias_address = 0 if bias is None else bias.data_ptr()

        def run(x: Tensor) -> Tensor:
            num_rows = x.shape[0]
            if num_rows > max_rows:
                return run_many(x)
            x, y = x.contiguous(), self._empty(num_rows, num_out)
            scratch_size = num_threads * (num_rows * num_in + kernels.TILE)
            scratch = self.launcher.scratch(scratch_size)
            addresses = y.data_ptr(), x.data_ptr(), weight.data_ptr(), bias_address
            self._launch(kernels.LINEAR, *addresses, scratch.data_ptr(), num_rows, num_out, num_in)
            return y

        return ComposedLinear(self, run, activation)


def pack_onednn(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Store a copy in oneDNN's blocked layout, so that it is not rebuilt in every call."""
    has_onednn = torch.backends.mkldnn.is_available()
    if not (has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return pack_rows(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x, packed, bias, "none", [], "")


def pack_rows(weight: Tensor, bias: Tensor | None) -> LinearFn:
    return lambda x: F.linear(x, weight, bias)
