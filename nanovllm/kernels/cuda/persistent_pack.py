"""From a model's weights to its persistent step, or why it has none."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from nanovllm.kernels.cuda.ops import CudaLinear
from nanovllm.kernels.cuda.persistent_codes import LOWER, MIDDLE
from nanovllm.kernels.cuda.persistent_step import PersistentStep, StepShape, device_problem
from nanovllm.kernels.cuda.step_tensors import StackedCodes, StepConstants, StepTensors
from nanovllm.kernels.cuda.stored_linear import StoredLinear
from nanovllm.kernels.ops import DecoderWeights, PackedLinear
from nanovllm.kernels.stored_weights import BLOCK, Fp8Weight, StoredWeight, num_blocks
from nanovllm.kernels.stored_weights import MIDDLE as MIDDLE_CODE

logger = logging.getLogger(__name__)

Linear = CudaLinear | StoredLinear


def pack_step(weights: DecoderWeights) -> PersistentStep | None:
    problem = _problem(weights)
    if problem is not None:
        logger.info("A sequence alone runs layer by layer: %s", problem)
        return None
    return PersistentStep(_shape(weights), pack_tensors(weights), pack_constants(weights))


def pack_tensors(weights: DecoderWeights) -> StepTensors:
    layers = weights.layers
    qkv = [_linear(layer.qkv) for layer in layers]
    head = weights.head
    assert isinstance(head, CudaLinear)
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
        head=head.weight,
        rope=layers[0].rope,
    )


def pack_constants(weights: DecoderWeights) -> StepConstants:
    layer = weights.layers[0]
    activation = _linear(layer.gate_up).activation
    assert activation is not None
    return StepConstants(weights.norm.eps, layer.scale, layer.window, activation)


def _problem(weights: DecoderWeights) -> str | None:
    linears = [linear for layer in _linears(weights) for linear in layer]
    if not isinstance(weights.head, CudaLinear) or any(
        not isinstance(linear, CudaLinear | StoredLinear) for linear in linears
    ):
        return "its weights are not plain matrices in 16 bits, or codes"
    if weights.head.weight.dtype != torch.bfloat16:
        return "its weights are not bfloat16"
    if len({_bits(_linear(linear)) for linear in linears}) > 1:
        return "its weights are not all of as many bits"
    if any(_is_unusual(_linear(linear)) for linear in linears):
        return "its codes have other groups than of 128, or scales of more digits than bfloat16"
    if problem := device_problem(weights.embedding.device):
        return problem
    if problem := _shape(weights).problem:
        return problem
    return _odd_layers(weights) or _lack_of_room(weights)


def _bits(linear: Linear) -> int:
    if isinstance(linear, CudaLinear):
        return 16
    return 8 if isinstance(linear.weight, Fp8Weight) else 4


def _is_unusual(linear: Linear) -> bool:
    if not isinstance(linear, StoredLinear) or isinstance(linear.weight, Fp8Weight):
        return False
    return linear.weight.group != BLOCK or not _is_bfloat16(linear.weight.scales)


def _odd_layers(weights: DecoderWeights) -> str | None:
    """Why the kernel cannot do what some of the layers do."""
    layers = weights.layers
    head = weights.head
    assert isinstance(head, CudaLinear)
    if weights.embedding_scale != 1 or head.bias is not None:
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
    largest = max(sum(_codes(_linear(linear)).nbytes for linear in kind) for kind in kinds)
    device = weights.embedding.device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = free + cached
    if largest > room:
        return f"{largest:,} bytes of weights cannot be moved within {room:,}"
    return None


def _shape(weights: DecoderWeights) -> StepShape:
    layer, dim = weights.layers[0], weights.head_dim
    qkv, down = _linear(layer.qkv), _linear(layer.down)
    num_kv_heads = (qkv.weight.shape[0] // dim - weights.num_heads) // 2
    assert isinstance(weights.head, CudaLinear)
    vocab, hidden = weights.head.weight.shape
    sizes = hidden, weights.num_heads, num_kv_heads, dim, down.weight.shape[1], vocab
    return StepShape(*sizes, _bits(qkv))


def _linears(weights: DecoderWeights) -> list[tuple[PackedLinear, ...]]:
    return [(layer.qkv, layer.o, layer.gate_up, layer.down) for layer in weights.layers]


def _linear(packed: PackedLinear) -> Linear:
    assert isinstance(packed, CudaLinear | StoredLinear)
    return packed


def _codes(linear: Linear) -> Tensor:
    """A weight's own tensor, which everybody who reads it shares."""
    weight = linear.weight
    return weight if isinstance(weight, Tensor) else weight.words


def _move_together(linears: list[Linear]) -> Tensor | StackedCodes:
    """Make the weights of all layers views of one tensor, so that none is held twice."""
    first = _codes(linears[0])
    stacked = first.new_empty(len(linears), *first.shape)
    for i, linear in enumerate(linears):
        stacked[i].copy_(_codes(linear))
        if isinstance(linear, CudaLinear):
            linear.weight = stacked[i]
        else:
            linear.weight.move_to(stacked[i])
    if isinstance(linears[0], CudaLinear):
        return stacked
    stored = [linear.weight for linear in linears if isinstance(linear, StoredLinear)]
    return StackedCodes(_bits(linears[0]), stacked, torch.stack(list(map(factors_of, stored))))


def _stack_biases(linears: list[Linear]) -> Tensor | None:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return torch.stack(biases) if biases else None


def _stack_qk_norms(weights: DecoderWeights) -> Tensor | None:
    norms = [layer.qk_norm for layer in weights.layers if layer.qk_norm is not None]
    return _stack_pairs([(norm.q, norm.k) for norm in norms]) if norms else None


def _stack_pairs(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([torch.stack(pair) for pair in pairs]).bfloat16()


def _is_bfloat16(values: Tensor) -> bool:
    return bool((values.bfloat16() == values).all())


def factors_of(weight: StoredWeight) -> Tensor:
    """What turns sums over 128 codes into those over weights, in a word each: [out, in / 128]."""
    if isinstance(weight, Fp8Weight):
        scales = weight.scales.expand(-1, num_blocks(weight.num_in)) * LOWER
        return scales.contiguous().view(torch.int32)
    zeros = torch.full_like(weight.scales, MIDDLE_CODE) if weight.zeros is None else weight.zeros
    halves = (zeros + MIDDLE).bfloat16(), weight.scales.bfloat16()
    return torch.stack(halves, -1).view(torch.int32).squeeze(-1)
