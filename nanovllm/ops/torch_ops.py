"""Every operation in plain torch: the reference for kernels, and the fallback without them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.composed_linear import ComposedLinear
from nanovllm.ops.fp8 import hadamard_exponents, hadamard_transform, quantize
from nanovllm.ops.interface import (
    Activation,
    LayerCache,
    NormWeights,
    PackedExperts,
    QKNormWeights,
    ResidualStream,
    Routing,
)
from nanovllm.ops.quantized_weight import Weight
from nanovllm.ops.torch_delta_net import gated_delta_net
from nanovllm.ops.torch_linear import compose_linear


@dataclass(frozen=True, slots=True)
class TorchOps:
    """`Ops` in plain torch; `torch_linear.linear` explains `matmul_dtype`."""

    matmul_dtype: torch.dtype | None = None

    @staticmethod
    def embed(token_ids: Tensor, table: Weight, scale: float) -> Tensor:
        assert isinstance(table, Tensor)
        x = F.embedding(token_ids, table)
        return x if scale == 1 else x * scale

    def norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        residual, update = hidden.residual, hidden.update
        if update is not None and hidden.scales is not None:
            residual = (residual.float() + hidden.scales.apply(update)).to(residual.dtype)
        elif update is not None:
            residual = residual + update
        return rms_norm(residual, norm.weight, norm.eps), residual

    def add_norm(self, residual: Tensor, x: Tensor, norm: NormWeights) -> Tensor:
        return residual + rms_norm(x, norm.weight, norm.eps)

    def rope_write(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        rope: Tensor,
        positions: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> None:
        num_kv_heads = cache.k.shape[2]
        q, k, v = qkv.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
        angles = rope[positions].unsqueeze(2).unbind(1)  # each [tokens, 1, dim / 2]
        if norm is not None:
            for heads, weight in ((q, norm.q), (k, norm.k)):
                rows = heads.flatten(-weight.dim())  # each row is one head, or all heads of a token
                heads.copy_(rms_norm(rows, weight.flatten(), norm.eps).view_as(heads))
        q.copy_(rotate(q, *angles[-2:]))
        k.copy_(rotate(k, *angles[:2]))
        if cache.k_exponents is not None:
            of_q, of_k = hadamard_exponents(q.shape[2])
            q.copy_(hadamard_transform(q, of_q))
            k = hadamard_transform(k, of_k)
        _write_rows(cache.k, cache.k_exponents, k, slot_mapping)
        _write_rows(cache.v, cache.v_exponents, v, slot_mapping)

    gated_delta_net = staticmethod(gated_delta_net)

    @staticmethod
    def multiply_sigmoid(x: Tensor, gate: Tensor, base: Tensor | None = None) -> Tensor:
        y = x.float() * gate.float().sigmoid()
        return (y if base is None else y + base).to(x.dtype)

    def act_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    @staticmethod
    def scale_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
        if softcap is None:
            return logits.mul_(scale)
        return logits.mul_(scale / softcap).tanh_().mul_(softcap)

    def pack_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation | None, allow_copy: bool
    ) -> ComposedLinear:
        return compose_linear(self, weight, bias, activation, self.matmul_dtype)

    def pack_lm_head(self, weight: Weight, allow_copy: bool) -> ComposedLinear:
        return compose_linear(self, weight, None, None, out_dtype=torch.float32)

    def pack_experts(self, gate_up: Weight, down: Weight, routing: Routing) -> PackedExperts:
        from nanovllm.ops.torch_experts import compose_experts

        return compose_experts(self, gate_up, down, routing, self.matmul_dtype)


def _write_rows(
    cached: Tensor, exponents: Tensor | None, rows: Tensor, slot_mapping: Tensor
) -> None:
    if exponents is not None:
        quantized, block_size = quantize(rows), cached.shape[1]
        exponents[slot_mapping // block_size, :, slot_mapping % block_size] = quantized.exponents
        cached, rows = cached.view(torch.uint8), quantized.values.view(torch.uint8)
    cached.view(-1, *rows.shape[1:])[slot_mapping] = rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square, in float32, then scale by weight."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(x.dtype) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + dim / 2) of x [tokens, heads, dim]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
