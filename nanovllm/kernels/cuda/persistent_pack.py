"""From a model's weights to its persistent step, or why it has none."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.kernels.cuda.dequantize import CudaWeight
from nanovllm.kernels.cuda.ops import CudaExperts, CudaLinear
from nanovllm.kernels.cuda.persistent_products import LOWER, MIDDLE
from nanovllm.kernels.cuda.persistent_shape import NO_EXPERTS, ExpertsShape, StepShape
from nanovllm.kernels.cuda.persistent_step import PersistentStep, device_problem
from nanovllm.kernels.cuda.step_tensors import StackedCodes, StepConstants, StepTensors
from nanovllm.kernels.ops import (
    Activation,
    DecoderWeights,
    LayerWeights,
    PackedLinear,
    Routing,
    SparseWeights,
)
from nanovllm.kernels.quantized_weight import BLOCK, QuantizedWeight, num_blocks
from nanovllm.kernels.quantized_weight import MIDDLE as MIDDLE_CODE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """The matrices of a layer."""

    qkv: CudaWeight
    o: CudaWeight
    gate_up: CudaWeight
    down: CudaWeight
    router: Tensor | None

    @property
    def large(self) -> tuple[CudaWeight, ...]:
        return self.qkv, self.o, self.gate_up, self.down


def pack_step(weights: DecoderWeights) -> PersistentStep | None:
    problem = _problem(weights)
    if problem is not None:
        logger.info("A sequence alone runs layer by layer: %s", problem)
        return None
    return PersistentStep(_shape(weights), pack_tensors(weights), pack_constants(weights))


def pack_tensors(weights: DecoderWeights) -> StepTensors:
    layers, matrices = weights.layers, _matrices(weights)
    routers = [each.router for each in matrices if each.router is not None]
    return StepTensors(
        embedding=weights.embedding,
        norms=_stack_pairs([(layer.norm.weight, layer.mlp_norm.weight) for layer in layers]),
        qkv=move_together([each.qkv for each in matrices]),
        qkv_bias=_stack_biases(layers),
        qk_norms=_stack_qk_norms(weights),
        o=move_together([each.o for each in matrices]),
        gate_up=move_together([each.gate_up for each in matrices]),
        down=move_together([each.down for each in matrices]),
        final_norm=weights.norm.weight.bfloat16(),
        head=_head(weights),
        rope=layers[0].rope,
        router=torch.stack(routers) if routers else None,
    )


def pack_constants(weights: DecoderWeights) -> StepConstants:
    layer, routing = weights.layers[0], _routing(weights.layers[0])
    activation = "silu" if isinstance(layer.mlp, SparseWeights) else _activation(layer.mlp.gate_up)
    return StepConstants(weights.norm.eps, layer.scale, layer.window, activation, routing)


def _problem(weights: DecoderWeights) -> str | None:
    if not all(map(_is_known, weights.layers)) or not _is_dense(weights.head):
        return "its weights are not plain matrices in 16 bits, or codes beside a plain head"
    if _head(weights).dtype != torch.bfloat16:
        return "its weights are not bfloat16"
    matrices = [matrix for each in _matrices(weights) for matrix in each.large]
    if len({_bits(matrix) for matrix in matrices}) > 1:
        return "its weights differ in bits"
    if any(map(_is_unusual, matrices)):
        return "its codes have other groups than of 128, or scales of more digits than bfloat16"
    if len({_routing(layer) for layer in weights.layers}) > 1:
        return "some layers have experts, and some have none"
    if problem := device_problem(weights.embedding.device):
        return problem
    if problem := _shape(weights).problem:
        return problem
    return _odd_layers(weights) or _lack_of_room(weights)


def _is_known(layer: LayerWeights) -> bool:
    linears = [layer.qkv, layer.o]
    if isinstance(layer.mlp, SparseWeights):
        is_known = isinstance(layer.mlp.experts, CudaExperts)
        return is_known and _is_dense(layer.mlp.router) and all(map(_has_matrix, linears))
    return all(map(_has_matrix, (*linears, layer.mlp.gate_up, layer.mlp.down)))


def _has_matrix(packed: PackedLinear) -> bool:
    return isinstance(packed, CudaLinear)


def _is_dense(packed: PackedLinear) -> bool:
    return isinstance(packed, CudaLinear) and isinstance(packed.weight, Tensor)


def _bits(weight: CudaWeight) -> int:
    return 16 if isinstance(weight, Tensor) else weight.bits


def _is_unusual(weight: CudaWeight) -> bool:
    if isinstance(weight, Tensor) or weight.bits == 8:
        return False
    return weight.group != BLOCK or not _is_bfloat16(weight.scales)


def _odd_layers(weights: DecoderWeights) -> str | None:
    """Why the kernel cannot do what some of the layers do."""
    layers = weights.layers
    if weights.embedding_scale != 1 or _bias(weights.head) is not None:
        return "it scales embeddings, or its head has a bias"
    others = [linear for layer in layers for linear in _linears(layer)[1:]]
    if any(_bias(linear) is not None for linear in others):
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
    """While the weights of one kind move, they are there twice; factors of codes come on top."""
    kinds = list(zip(*(each.large for each in _matrices(weights)), strict=True))
    largest = max(sum(_words(matrix).nbytes for matrix in kind) for kind in kinds)
    largest += sum(_factor_bytes(matrix) for kind in kinds for matrix in kind)
    device = weights.embedding.device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = free + cached
    if largest > room:
        return f"{largest:,} bytes of weights cannot be moved within {room:,}"
    return None


def _factor_bytes(weight: CudaWeight) -> int:
    """Of both orders in which they are there while they are laid out, with padding of a tile."""
    if isinstance(weight, Tensor):
        return 0
    num_out, num_in = weight.shape
    return 3 * 4 * num_out * num_blocks(num_in)


def _shape(weights: DecoderWeights) -> StepShape:
    first, dim, routing = _matrices(weights)[0], weights.head_dim, _routing(weights.layers[0])
    num_kv_heads = (first.qkv.shape[0] // dim - weights.num_heads) // 2
    vocab, hidden = _head(weights).shape
    mlp, experts = first.down.shape[-1], NO_EXPERTS
    if routing is not None and first.router is not None:
        experts = ExpertsShape(len(first.router), routing.top_k, mlp, routing.is_normalized)
        mlp *= routing.top_k
    sizes = hidden, weights.num_heads, num_kv_heads, dim, mlp, vocab
    return StepShape(*sizes, _bits(first.qkv), experts)


def _matrices(weights: DecoderWeights) -> list[LayerMatrices]:
    found = []
    for layer in weights.layers:
        attention = _matrix(layer.qkv), _matrix(layer.o)
        if isinstance(layer.mlp, SparseWeights):
            experts, router = layer.mlp.experts, _matrix(layer.mlp.router)
            assert isinstance(experts, CudaExperts)
            assert isinstance(router, Tensor)
            found.append(LayerMatrices(*attention, experts.gate_up, experts.down, router))
        else:
            mlp = _matrix(layer.mlp.gate_up), _matrix(layer.mlp.down)
            found.append(LayerMatrices(*attention, *mlp, None))
    return found


def _linears(layer: LayerWeights) -> tuple[PackedLinear, ...]:
    mlp = layer.mlp
    rest = (mlp.router,) if isinstance(mlp, SparseWeights) else (mlp.gate_up, mlp.down)
    return layer.qkv, layer.o, *rest


def _matrix(packed: PackedLinear) -> CudaWeight:
    assert isinstance(packed, CudaLinear)
    return packed.weight


def _head(weights: DecoderWeights) -> Tensor:
    head = _matrix(weights.head)
    assert isinstance(head, Tensor)
    return head


def _bias(packed: PackedLinear) -> Tensor | None:
    assert isinstance(packed, CudaLinear)
    return packed.bias


def _activation(packed: PackedLinear) -> Activation:
    assert isinstance(packed, CudaLinear)
    assert packed.activation is not None
    return packed.activation


def _routing(layer: LayerWeights) -> Routing | None:
    if not isinstance(layer.mlp, SparseWeights):
        return None
    assert isinstance(layer.mlp.experts, CudaExperts)
    return layer.mlp.experts.routing


def _words(weight: CudaWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.qweight


def move_together(weights: list[CudaWeight]) -> Tensor | StackedCodes:
    """Make the weights of all layers views of one tensor, so that none is held twice."""
    first = _words(weights[0])
    stacked = first.new_empty(len(weights), *first.shape)
    for i, weight in enumerate(weights):
        words = _words(weight)
        stacked[i].copy_(words)
        words.data = stacked[i]
    stored = [weight for weight in weights if not isinstance(weight, Tensor)]
    if not stored:
        return stacked
    return StackedCodes(_bits(weights[0]), stacked, torch.stack(list(map(factors_of, stored))))


def factors_of(weight: QuantizedWeight) -> Tensor:
    """What turns sums over 128 codes into those over weights, in a word each: [out, in / 128]."""
    if weight.bits == 8:
        scales = weight.scales.expand(-1, num_blocks(weight.num_in)) * LOWER
        return scales.contiguous().view(torch.int32)
    zeros = weight.zero_points
    zeros = torch.full_like(weight.scales, MIDDLE_CODE) if zeros is None else zeros
    halves = (zeros + MIDDLE).bfloat16(), weight.scales.bfloat16()
    return torch.stack(halves, -1).view(torch.int32).squeeze(-1)


def _stack_biases(layers: list[LayerWeights]) -> Tensor | None:
    biases = [bias for layer in layers if (bias := _bias(layer.qkv)) is not None]
    return torch.stack(biases) if biases else None


def _stack_qk_norms(weights: DecoderWeights) -> Tensor | None:
    norms = [layer.qk_norm for layer in weights.layers if layer.qk_norm is not None]
    return _stack_pairs([(norm.q, norm.k) for norm in norms]) if norms else None


def _stack_pairs(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([torch.stack(pair) for pair in pairs]).bfloat16()


def _is_bfloat16(values: Tensor) -> bool:
    return bool((values.bfloat16() == values).all())
