"""A whole decode step of one sequence in plain torch: the reference for the persistent kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.devices.cuda.persistent.persistent_step import (
    StackedQuantized,
    StepConstants,
    StepTensors,
)
from nanovllm.ops import fp8
from nanovllm.ops.interface import Routing
from nanovllm.ops.torch_ops import TorchOps, rms_norm, rotate


def reference_step(
    tensors: StepTensors,
    constants: StepConstants,
    token: int,
    offsets: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    dtype: torch.dtype,
    is_fp8: bool = False,
) -> Tensor:
    """Return the logits [vocab] of a context's last token, and store its keys and values.

    `offsets` are the slots of the context's tokens in caches [tokens, kv_heads, head_dim]. With
    `is_fp8`, the caches hold the values of an FP8 cache, dequantized.
    """
    x = tensors.embedding[token].to(dtype)
    for layer in range(len(tensors.norms)):
        norm, mlp_norm = tensors.norms[layer]
        bias = None if tensors.qkv_bias is None else tensors.qkv_bias[layer].to(dtype)
        qkv = F.linear(rms_norm(x, norm, constants.eps), _plain(tensors.qkv)[layer].to(dtype), bias)
        k_cache, v_cache = k_caches[layer], v_caches[layer]
        qk_norms = None if tensors.qk_norms is None else tensors.qk_norms[layer]
        angles = tensors.rope[len(offsets) - 1]
        output = _attend(qkv, qk_norms, angles, offsets, k_cache, v_cache, constants, is_fp8)
        x = x + F.linear(output, _plain(tensors.o)[layer].to(dtype))
        normed = rms_norm(x, mlp_norm, constants.eps)
        gate_up, down = _plain(tensors.gate_up)[layer], _plain(tensors.down)[layer]
        if tensors.router is None:
            x = x + _mlp(normed, gate_up.to(dtype), down.to(dtype))
            continue
        logits = F.linear(normed, tensors.router[layer].to(dtype))
        for expert, weight in _choose(logits.bfloat16(), constants.routing):
            y = _mlp(normed, gate_up[expert].to(dtype), down[expert].to(dtype))
            x = x + (weight * y).to(dtype)
    return F.linear(rms_norm(x, tensors.final_norm, constants.eps), tensors.head.to(dtype))


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return F.linear(TorchOps().act_and_mul(F.linear(x, gate_up), "silu"), down)


def _choose(logits: Tensor, routing: Routing | None) -> list[tuple[int, float]]:
    assert routing is not None
    odds, experts = logits.float().softmax(-1).topk(routing.top_k)
    weights = odds / odds.sum() if routing.is_normalized else odds
    return list(zip(experts.tolist(), weights.bfloat16().tolist(), strict=True))


def _plain(weight: Tensor | StackedQuantized) -> Tensor:
    assert isinstance(weight, Tensor), "pass dequantized weights to the reference"
    return weight


def _attend(
    qkv: Tensor,
    norms: Tensor | None,
    angles: Tensor,
    offsets: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    constants: StepConstants,
    is_fp8: bool,
) -> Tensor:
    num_kv_heads, head_dim = k_cache.shape[1:]
    heads = qkv.view(-1, head_dim)
    q, k, v = heads.split([len(heads) - 2 * num_kv_heads, num_kv_heads, num_kv_heads])
    if norms is not None:
        q, k = (rms_norm(x, norms[i], constants.eps) for i, x in enumerate((q, k)))
    q, k = (rotate(x, angles[0], angles[1]) for x in (q, k))
    if is_fp8:
        q, k = (
            fp8.hadamard_transform(x, exponent).to(x.dtype)
            for x, exponent in zip((q, k), fp8.hadamard_exponents(head_dim), strict=True)
        )
        k, v = (fp8.dequantize(fp8.quantize(x), x.dtype) for x in (k, v))
    k_cache[offsets[-1]], v_cache[offsets[-1]] = k.to(k_cache.dtype), v.to(v_cache.dtype)
    seen = offsets if constants.window is None else offsets[-constants.window :]
    keys, values = k_cache[seen].to(q.dtype), v_cache[seen].to(q.dtype)
    keys[-1], values[-1] = k, v
    group = len(q) // num_kv_heads
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,khd->hk", q.float(), keys.float()) * constants.scale
    weights = scores.softmax(-1)
    return torch.einsum("hk,khd->hd", weights, values.float()).to(qkv.dtype).flatten()
