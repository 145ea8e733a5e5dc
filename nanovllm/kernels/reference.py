"""Every operation in plain torch: the meaning of the kernels, and the way where there are none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.base import PackedLinear, QKNormWeights
from nanovllm.kernels.composed_linear import ComposedLinear


class TorchOps:
    launcher = None

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return rms_norm(residual, weight, eps), residual

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
        num_kv_heads, head_dim = k_cache.shape[2:]
        q, k, v = qkv.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
        turns = rope[positions].unsqueeze(2)  # [tokens, 2, 1, dim / 2]
        if norm is not None:
            q.copy_(rms_norm(q, norm.q, norm.eps))
            k.copy_(rms_norm(k, norm.k, norm.eps))
        q.copy_(rotate(q, turns[:, 0], turns[:, 1]))
        k.copy_(rotate(k, turns[:, 0], turns[:, 1]))
        # Where attention masks a position it still adds 0 * v: a NaN would spread to other rows.
        k_cache.view(-1, num_kv_heads, head_dim)[kv_slots] = k.nan_to_num(0.0, 0.0, 0.0)
        v_cache.view(-1, num_kv_heads, head_dim)[kv_slots] = v.nan_to_num(0.0, 0.0, 0.0)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, is_gated: bool, has_room: bool
    ) -> PackedLinear:
        return ComposedLinear(self, lambda x: F.linear(x, weight, bias), is_gated)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square, in float32, then scale by weight."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + dim / 2) of x [tokens, heads, dim]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
