"""Collect a model's weights for the persistent step, or find out why the model is unsupported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm.attention.backend import AttentionSpec
from nanovllm.devices.cuda.kernels.dequantize import CudaWeight
from nanovllm.devices.cuda.ops import CudaExperts, CudaLinear
from nanovllm.devices.cuda.persistent.persistent_step import (
    StackedQuantized,
    StepConstants,
    StepTensors,
    device_problem,
)
from nanovllm.devices.cuda.persistent.sizes import NO_EXPERTS, ExpertsShape, StepShape
from nanovllm.devices.cuda.persistent.tile_mma import FP8_SCALE_FACTOR, INT4_OFFSET
from nanovllm.layers.layernorm import QKNorm
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.moe import SparseMoeBlock
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models.decoder import DecoderLayer, DecoderModel
from nanovllm.ops.interface import NormWeights, QKNormWeights, Routing
from nanovllm.ops.quantized_weight import BLOCK, MIDDLE, QuantizedWeight, num_blocks
from nanovllm.worker.kv_cache import KVCacheSpec

KEY_TILE = 32  # number of keys that are loaded together and must lie in one KV-cache block


@dataclass(frozen=True, slots=True)
class StepLayer:
    """Weights and attributes of a decoder layer that the kernel needs."""

    attention: AttentionSpec
    rope: Tensor
    norm: NormWeights
    mlp_norm: NormWeights
    qk_norm: QKNormWeights | None
    linears: list[CudaLinear]  # qkv, o, gate_up, down; with experts: qkv, o, router
    experts: CudaExperts | None

    @property
    def matrices(self) -> tuple[CudaWeight, ...]:
        """The weights of qkv, o, gate_up and down."""
        if self.experts is None:
            return tuple(linear.weight for linear in self.linears)
        qkv, o, _ = self.linears
        return qkv.weight, o.weight, self.experts.gate_up, self.experts.down

    @property
    def router(self) -> Tensor | None:
        weight = self.linears[-1].weight
        return weight if self.experts is not None and isinstance(weight, Tensor) else None

    @property
    def routing(self) -> Routing | None:
        return None if self.experts is None else self.experts.routing


def step_layers(model: DecoderModel) -> list[StepLayer]:
    """Return the layers of a model, or an empty list if the kernel does not support one of them."""
    pairs = zip(model.model.layers, model.model.ropes, strict=True)
    layers = [_step_layer(layer, rope) for layer, rope in pairs]
    known = [layer for layer in layers if layer is not None]
    return known if len(known) == len(layers) else []


def _step_layer(layer: nn.Module, rope: Tensor) -> StepLayer | None:
    if not isinstance(layer, DecoderLayer):
        return None
    attention, mlp, experts = layer.self_attn, layer.mlp, None
    if not isinstance(attention, SelfAttention) or attention.num_gates:
        return None
    if not isinstance(attention.qk_norm, QKNorm | None):
        return None
    modules = [attention.qkv_proj, attention.o_proj]
    if isinstance(mlp, GatedMLP):
        modules += [mlp.gate_up_proj, mlp.down_proj]
    elif isinstance(mlp, SparseMoeBlock) and isinstance(mlp.packed, CudaExperts):
        if mlp.shared_expert is not None:
            return None
        modules.append(mlp.gate)
        experts = mlp.packed
    packed = [module.packed for module in modules]
    linears = [linear for linear in packed if isinstance(linear, CudaLinear)]
    found = StepLayer(
        attention.spec,
        rope,
        layer.input_layernorm.weights,
        layer.post_attention_layernorm.weights,
        None if attention.qk_norm is None else attention.qk_norm.weights,
        linears,
        experts,
    )
    is_known = len(linears) == len(packed) == (4 if experts is None else 3)
    return found if is_known and (experts is None or found.router is not None) else None


def find_cache_problem(cache: KVCacheSpec) -> str | None:
    """Return the reason why the kernel cannot read a KV cache, or None."""
    if cache.block_size % KEY_TILE:
        return f"kvcache_block_size={cache.block_size} is not a multiple of {KEY_TILE}"
    return None


def find_problem(model: DecoderModel, layers: list[StepLayer], cache: KVCacheSpec) -> str | None:
    """Return the reason why the kernel cannot run a model on its device, or None."""
    packed = model.lm_head.packed
    head = packed.weight if isinstance(packed, CudaLinear) else None
    if not model.lm_head.group.is_alone:
        return "it is sharded over several ranks"
    if not layers or not isinstance(head, Tensor) or _embedding(model) is None:
        return (
            "it has layers that are not supported, weights that are neither 16-bit nor quantized, "
            "or a quantized embedding or LM head"
        )
    if head.dtype != torch.bfloat16:
        return "its weights are not bfloat16"
    matrices = [matrix for layer in layers for matrix in layer.matrices]
    if len({_bits(matrix) for matrix in matrices}) > 1:
        return "its weights differ in bit width"
    if any(map(_is_unsupported, matrices)):
        return "its quant groups do not have 128 values, or its scales are not exact in bfloat16"
    if len({layer.routing for layer in layers}) > 1:
        return "its layers differ in their routing to experts"
    return (
        device_problem(head.device)
        or step_shape(model, layers, cache).problem
        or _find_layer_problem(model, layers)
    )


def _find_layer_problem(model: DecoderModel, layers: list[StepLayer]) -> str | None:
    if model.model.embed_tokens.scale != 1 or model.lm_head.is_scaled:
        return "it scales embeddings or logits"
    if any(layer.attention.softcap is not None for layer in layers):
        return "it caps attention scores"
    if any(linear.activation not in (None, "silu") for layer in layers for linear in layer.linears):
        return "its activation is not silu"
    if any(linear.bias is not None for layer in layers for linear in layer.linears[1:]):
        return "it has biases other than those of q, k and v"
    if len({(layer.attention, layer.rope.data_ptr()) for layer in layers}) > 1:
        return "its layers differ in their attention"
    if layers[0].rope.shape[1] != 2:
        return "it scales queries by their position"
    norms = [norm for layer in layers for norm in (layer.norm, layer.mlp_norm)]
    norms.append(model.model.norm.weights)
    qk_norms = [layer.qk_norm for layer in layers if layer.qk_norm is not None]
    values = [norm.weight for norm in norms] + [w for norm in qk_norms for w in (norm.q, norm.k)]
    eps = {norm.eps for norm in norms} | {norm.eps for norm in qk_norms}
    if len(eps) > 1 or not all(map(_is_bfloat16, values)):
        return "its norms differ in eps, or their weights are not exact in bfloat16"
    return None


def step_shape(model: DecoderModel, layers: list[StepLayer], cache: KVCacheSpec) -> StepShape:
    first = layers[0]
    qkv, o, _, down = first.matrices
    dim = 2 * first.rope.shape[-1]
    num_heads = o.shape[1] // dim
    num_kv_heads = (qkv.shape[0] // dim - num_heads) // 2
    mlp, experts = down.shape[-1], NO_EXPERTS
    if first.router is not None and first.routing is not None:
        top_k, is_normalized = first.routing.top_k, first.routing.is_normalized
        experts = ExpertsShape(len(first.router), top_k, mlp, is_normalized)
        mlp *= top_k
    vocab, hidden = _head(model).shape
    heads, cache_bits = (num_heads, num_kv_heads, dim), 8 * cache.dtype.itemsize
    return StepShape(hidden, *heads, mlp, vocab, _bits(qkv), experts, cache_bits)


def step_constants(model: DecoderModel, layers: list[StepLayer]) -> StepConstants:
    spec, eps = layers[0].attention, model.model.norm.weights.eps
    return StepConstants(eps, spec.scale, spec.window, layers[0].routing)


def step_tensors(model: DecoderModel, layers: list[StepLayer]) -> StepTensors:
    embedding = _embedding(model)
    assert embedding is not None
    kinds = zip(*(layer.matrices for layer in layers), strict=True)
    qkv, o, gate_up, down = (move_together(list(kind)) for kind in kinds)
    biases = [bias for layer in layers if (bias := layer.linears[0].bias) is not None]
    qk_norms = [(norm.q, norm.k) for layer in layers if (norm := layer.qk_norm) is not None]
    routers = [layer.router for layer in layers if layer.router is not None]
    return StepTensors(
        embedding=embedding,
        norms=_stack_pairs([(layer.norm.weight, layer.mlp_norm.weight) for layer in layers]),
        qkv=qkv,
        qkv_bias=torch.stack(biases) if biases else None,
        qk_norms=_stack_pairs(qk_norms) if qk_norms else None,
        o=o,
        gate_up=gate_up,
        down=down,
        final_norm=model.model.norm.weights.weight.bfloat16(),
        head=_head(model),
        rope=layers[0].rope,
        router=torch.stack(routers) if routers else None,
    )


def move_together(weights: list[CudaWeight]) -> Tensor | StackedQuantized:
    """Move the weights of all layers into one tensor; each weight becomes a view of it."""
    first = _words(weights[0])
    stacked = first.new_empty(len(weights), *first.shape)
    for i, weight in enumerate(weights):
        words = _words(weight)
        stacked[i].copy_(words)
        words.data = stacked[i]
    stored = [weight for weight in weights if not isinstance(weight, Tensor)]
    if not stored:
        return stacked
    return StackedQuantized(_bits(weights[0]), stacked, torch.stack(list(map(pack_scales, stored))))


def pack_scales(weight: QuantizedWeight) -> Tensor:
    """Pack the scale and any zero point of each quant group into a word: int32 [out, in / 128].

    For FP8, the word is the float32 scale times FP8_SCALE_FACTOR. For 4 bits, its lower half is the
    zero point plus INT4_OFFSET and its upper half is the scale, both bfloat16.
    """
    if weight.bits == 8:
        scales = weight.scales.expand(-1, num_blocks(weight.num_in)) * FP8_SCALE_FACTOR
        return scales.contiguous().view(torch.int32)
    zeros = weight.zero_points
    zeros = torch.full_like(weight.scales, MIDDLE) if zeros is None else zeros
    halves = (zeros + INT4_OFFSET).bfloat16(), weight.scales.bfloat16()
    return torch.stack(halves, -1).view(torch.int32).squeeze(-1)


def _embedding(model: DecoderModel) -> Tensor | None:
    table = model.model.embed_tokens.table
    return table if isinstance(table, Tensor) else None


def _head(model: DecoderModel) -> Tensor:
    head = model.lm_head.packed
    assert isinstance(head, CudaLinear)
    assert isinstance(head.weight, Tensor)
    return head.weight


def _bits(weight: CudaWeight) -> int:
    return 16 if isinstance(weight, Tensor) else weight.bits


def _words(weight: CudaWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.qweight


def _is_unsupported(weight: CudaWeight) -> bool:
    if isinstance(weight, Tensor) or weight.bits == 8:
        return False
    return weight.group != BLOCK or not _is_bfloat16(weight.scales)


def _stack_pairs(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([torch.stack(pair) for pair in pairs]).bfloat16()


def _is_bfloat16(values: Tensor) -> bool:
    return bool((values.bfloat16() == values).all())
