"""Ops on the CPU: compiled kernels, and torch's oneDNN for products with many rows."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.devices.cpu.features import CpuFeatures
from nanovllm.kernels import widened
from nanovllm.kernels.composed_linear import ComposedLinear
from nanovllm.kernels.cpu import kernels
from nanovllm.kernels.cpu.blocks import BlockKernels
from nanovllm.kernels.cpu.mixture import PlainMixture, compose_experts
from nanovllm.kernels.cpu.program import Launcher, float_bits
from nanovllm.kernels.fp8_rows import spread_exponents, spread_size
from nanovllm.kernels.ops import (
    ACTIVATIONS,
    Activation,
    Hidden,
    LayerCache,
    LinearFn,
    NormWeights,
    PackedExperts,
    PackedLinear,
    QKNormWeights,
    Routing,
)
from nanovllm.kernels.stored_weights import StoredWeight
from nanovllm.kernels.torch_ops import compose_code_experts, compose_codes

# By the dtype that torch multiplies in. More rows than that and its product, the widening of a
# weight included, is faster: benchmarks/kernels/cpu_products.py.
MAX_LINEAR_ROWS = {torch.bfloat16: 8, torch.float32: 16}

# Of an expert, were the tokens spread evenly: benchmarks/kernels/cpu_products.py.
MAX_EXPERT_ROWS = {torch.bfloat16: 12, torch.float32: 32}


class NumbaOps:
    def __init__(self, launcher: Launcher, features: CpuFeatures) -> None:
        self.launcher = launcher
        self.can_pack = launcher.dtype in features.packs
        self.product_dtype = features.product_dtype(launcher.dtype)
        self.max_linear_rows = MAX_LINEAR_ROWS[self.product_dtype]
        self.max_expert_rows = MAX_EXPERT_ROWS[self.product_dtype]
        self._launch, self._empty = launcher.launch, launcher.empty
        self.blocks = BlockKernels(self)

    def embed(self, token_ids: Tensor, table: Tensor, scale: float) -> Tensor:
        num_rows, dim = len(token_ids), table.shape[1]
        out = self._empty(num_rows, dim)
        addresses = out.data_ptr(), table.data_ptr(), token_ids.data_ptr()
        self._launch(kernels.EMBED, *addresses, num_rows, dim, float_bits(scale))
        return out

    def norm(self, hidden: Hidden, norm: NormWeights) -> tuple[Tensor, Tensor]:
        assert hidden.scales is None, "which products on a GPU have"
        residual, update = hidden.residual, hidden.update
        num_rows, dim = residual.shape
        out = self._empty(num_rows, dim) if update is None else update
        addresses = out.data_ptr(), residual.data_ptr(), norm.weight.data_ptr()
        sizes = num_rows, dim, update is not None
        self._launch(kernels.NORM, *addresses, float_bits(norm.eps), *sizes)
        return out, residual

    def rope_write(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        rope: Tensor,
        positions: Tensor,
        cache: LayerCache,
        cache_offsets: Tensor,
    ) -> None:
        num_tokens, per_token, head_dim = qkv.shape
        block_size, num_kv_heads = cache.k.shape[1:3]
        kernel, of_codes = [kernels.ROPE_WRITE], list[int]()
        if cache.k_exponents is not None:
            kernel = [kernels.CALL, self.launcher.codes.rope_write]
            scratch = self.launcher.scratch(self.launcher.num_threads * head_dim)
            scales = (float_bits(2.0**exponent) for exponent in spread_exponents(head_dim))
            addresses = (part.data_ptr() for part in (*cache.parts[2:], scratch))
            of_codes = [*addresses, spread_size(head_dim), *scales]
        self._launch(
            *kernel,
            qkv.data_ptr(),
            rope.data_ptr(),
            0 if norm is None else norm.q.data_ptr(),
            0 if norm is None else norm.k.data_ptr(),
            0 if norm is None else float_bits(norm.eps),
            positions.data_ptr(),
            cache_offsets.data_ptr(),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            num_tokens,
            per_token - 2 * num_kv_heads,
            num_kv_heads,
            head_dim,
            block_size,
            *of_codes,
        )

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty(num_rows, size)
        curve = [float_bits(factor) for factor in ACTIVATIONS[activation]]
        self._launch(kernels.GATE, out.data_ptr(), gate_up.data_ptr(), num_rows, size, *curve)
        return out

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        weight = weight.contiguous()
        run_many = self._pack_many(weight, bias, has_room)
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

    def _pack_many(self, weight: Tensor, bias: Tensor | None, has_room: bool) -> LinearFn:
        """Choose the product of many rows: a packed copy pays only in the dtype it multiplies."""
        if has_room and self.can_pack and self.product_dtype == weight.dtype:
            return pack_onednn(weight, bias)
        return lambda x: widened.linear(x, weight, bias, self.product_dtype)

    def pack_codes(
        self,
        weight: StoredWeight,
        bias: Tensor | None,
        activation: Activation | None,
    ) -> PackedLinear:
        return compose_codes(self, weight, bias, activation)

    def pack_experts(self, gate_up: Tensor, down: Tensor, routing: Routing) -> PackedExperts:
        return compose_experts(self, PlainMixture(self, gate_up, down), routing)

    def pack_code_experts(
        self, gate_up: StoredWeight, down: StoredWeight, routing: Routing
    ) -> PackedExperts:
        return compose_code_experts(self, gate_up, down, routing)


def pack_onednn(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Store a copy in oneDNN's blocked layout, so that it is not rebuilt in every call."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x, packed, bias, "none", [], "")
