"""From a model's weights to its persistent step, or why it has none."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from nanovllm.kernels.cuda.ops import CudaLinear
from nanovllm.kernels.cuda.persistent_step import PersistentStep, StepShape, device_problem
from nanovllm.kernels.cuda.step_tensors import StepConstants, StepTensors
from nanovllm.kernels.ops import DecoderWeights, PackedLinear

logger = logging.getLogger(__name__)


def pack_step(weights: DecoderWeights) -> PersistentStep | None:
    problem = _problem(weights)
    if problem is not None:
        logger.info("A sequence alone runs layer by layer: %s", problem)
        return None
    return PersistentStep(_shape(weights), pack_tensors(weights), pack_constants(weights))


def pack_tensors(weights: DecoderWeights) -> StepTensors:
    layers = weights.layers
    qkv = [_linear(layer.qkv) for layer in layers]
    return StepTensors(
        embedding=weights.embedding,
        norms=_stack_pairs([(layer.norm.weight, layer.mlp_norm.weight) for layer in layers]),
        qkv=_move_together(qkv),
        qkv_bias=_stack_biases(qkv),
        qk_norms=_stack_qk_norms(weights),
        o=_move_together([_linear(layer.o) for layer in layers]),
        gate_up=_move_together([_linear(layer.gate_up) for layer in layers]),
        down=_move_together([_linear(layer.down) for layer in layers]),
        final_norm=weights.norm.weight.bfloat16(),
        head=_linear(weights.head).weight,
        rope=layers[0].rope,
    )


def pack_constants(weights: DecoderWeights) -> StepConstants:
    layer = weights.layers[0]
    activation = _linear(layer.gate_up).activation
    assert activation is not None
    return StepConstants(weights.norm.eps, layer.scale, layer.window, activation)


def _problem(weights: DecoderWeights) -> str | None:
    linears = [linear for layer in _linears(weights) for linear in layer]
    if any(not isinstance(linear, CudaLinear) for linear in linears):
        return "its weights are not plain matrices in 16 bits"
    if _linear(weights.head).weight.dtype != torch.bfloat16:
        return "its weights are not bfloat16"
    if problem := device_problem(weights.embedding.device):
        return problem
    if problem := _shape(weights).problem:
        return problem
    return _odd_layers(weights) or _lack_of_room(weights)


def _odd_layers(weights: DecoderWeights) -> str | None:
    """Why the kernel cannot do what some of the layers do."""
    layers = weights.layers
    if weights.embedding_scale != 1 or _linear(weights.head).bias is not None:
        return "it scales embeddings, or its head has a bias"
    others = [
        _linear(linear) for layer in layers for linear in (layer.o, layer.gate_up, layer.down)
    ]
    if any(linear.bias is not None for linear in others):
        return "there are biases beside those of q, k and v"
    if len({(layer.scale, layer.window, layer.rope.data_ptr()) for layer in layers}) > 1:
        return "layers differ in their attention"
    norms = [norm for layer in layers for norm in (layer.norm, layer.mlp_norm)] + [weights.norm]
    qk_norms = [layer.qk_norm for layer in layers if layer.qk_norm is not None]
    values = [norm.weight for norm in norms] + [w for norm in qk_norms for w in (norm.q, norm.k)]
    eps = {norm.eps for norm in norms} | {norm.eps for norm in qk_norms}
    if len(eps) > 1 or not all(map(_is_bfloat16, values)):
        return "its norms differ in eps, or have more digits than bfloat16"
    return None


def _lack_of_room(weights: DecoderWeights) -> str | None:
    """While the weights of one kind move, they are there twice."""
    kinds = zip(*_linears(weights), strict=True)
    largest = max(sum(_linear(linear).weight.nbytes for linear in kind) for kind in kinds)
    device = weights.embedding.device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = free + cached
    if largest > room:
        return f"{largest:,} bytes of weights cannot be moved within {room:,}"
    return None


def _shape(weights: DecoderWeights) -> StepShape:
    layer, dim = weights.layers[0], weights.head_dim
    num_kv_heads = (len(_linear(layer.qkv).weight) // dim - weights.num_heads) // 2
    vocab, hidden = _linear(weights.head).weight.shape
    mlp = _linear(layer.down).weight.shape[1]
    return StepShape(hidden, weights.num_heads, num_kv_heads, dim, mlp, vocab)


def _linears(weights: DecoderWeights) -> list[tuple[PackedLinear, ...]]:
    return [(layer.qkv, layer.o, layer.gate_up, layer.down) for layer in weights.layers]


def _linear(packed: PackedLinear) -> CudaLinear:
    assert isinstance(packed, CudaLinear)
    return packed


def _move_together(linears: list[CudaLinear]) -> Tensor:
    """Make the weights of all layers views of one tensor, so that none is held twice."""
    first = linears[0].weight
    stacked = first.new_empty(len(linears), *first.shape)
    for i, linear in enumerate(linears):
        stacked[i].copy_(linear.weight)
        linear.weight = stacked[i]
    return stacked


def _stack_biases(linears: list[CudaLinear]) -> Tensor | None:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return torch.stack(biases) if biases else None


def _stack_qk_norms(weights: DecoderWeights) -> Tensor | None:
    norms = [layer.qk_norm for layer in weights.layers if layer.qk_norm is not None]
    return _stack_pairs([(norm.q, norm.k) for norm in norms]) if norms else None


def _stack_pairs(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([torch.stack(pair) for pair in pairs]).bfloat16()


def _is_bfloat16(values: Tensor) -> bool:
    return bool((values.bfloat16() == values).all())
