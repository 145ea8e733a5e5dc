"""Ops on the CPU: compiled kernels, and oneDNN (through torch) for GEMMs with many rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.devices.cpu.features import CpuFeatures
from nanovllm.devices.cpu.kernels import dense
from nanovllm.devices.cpu.numba_delta_net import gated_delta_net
from nanovllm.devices.cpu.program import Argument, Launcher, float_bits
from nanovllm.ops.composed_linear import ComposedLinear
from nanovllm.ops.fp8 import hadamard_exponents, hadamard_size
from nanovllm.ops.interface import (
    ACTIVATIONS,
    Activation,
    LayerCache,
    LinearFn,
    NormWeights,
    PackedExperts,
    PackedLinear,
    QKNormWeights,
    ResidualStream,
    Routing,
)
from nanovllm.ops.quantized_weight import Panels, PanelWeight, QuantizedWeight, Weight
from nanovllm.ops.torch_linear import compose_linear, linear

if TYPE_CHECKING:
    from nanovllm.devices.cpu.gguf_weights import BlockKernels

# Maximum number of rows of x for our linear kernels, by GEMM dtype. For more rows, torch's GEMM is
# faster, even if it first upcasts the weight (measured by benchmarks/kernels/cpu_products.py).
MAX_LINEAR_ROWS = {torch.bfloat16: 8, torch.float32: 16}

# The limit for the average number of rows per expert, measured with evenly routed tokens.
MAX_EXPERT_ROWS = {torch.bfloat16: 12, torch.float32: 32}


class NumbaOps:
    def __init__(self, launcher: Launcher, features: CpuFeatures) -> None:
        self.launcher = launcher
        self.can_pack = launcher.dtype in features.packs
        self.matmul_dtype = features.matmul_dtype(launcher.dtype)
        self.max_linear_rows = MAX_LINEAR_ROWS[self.matmul_dtype]
        self.max_expert_rows = MAX_EXPERT_ROWS[self.matmul_dtype]
        self._launch, self._empty = launcher.launch, launcher.empty
        self._blocks: dict[torch.dtype, BlockKernels] = {}  # keyed by the dtype of their output

    @property
    def blocks(self) -> BlockKernels:
        """Kernels for GGUF quant blocks."""
        return self._blocks_for(self.launcher.dtype)

    def _blocks_for(self, out_dtype: torch.dtype) -> BlockKernels:
        if out_dtype not in self._blocks:
            from nanovllm.devices.cpu.gguf_weights import BlockKernels

            is_wide = out_dtype != self.launcher.dtype
            matmul_dtype = out_dtype if is_wide else self.matmul_dtype
            self._blocks[out_dtype] = BlockKernels(self, matmul_dtype, out_dtype)
        return self._blocks[out_dtype]

    def pack_blocks(self, kind: str, rows: Tensor) -> Panels:
        from nanovllm.devices.cpu.gguf_weights import to_panels

        return to_panels(kind, rows)

    def embed(self, token_ids: Tensor, table: Weight, scale: float) -> Tensor:
        if isinstance(table, PanelWeight):
            return self.blocks.embed(token_ids, table, scale)
        assert isinstance(table, Tensor)
        out = self._empty(len(token_ids), table.shape[1])
        self._launch(dense.embed, out, table, token_ids, *out.shape, float_bits(scale))
        return out

    def norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        assert hidden.scales is None, "only FP8 GEMMs on a GPU return scales"
        residual, update = hidden.residual, hidden.update
        num_rows, dim = residual.shape
        out = self._empty(num_rows, dim) if update is None else update
        sizes = num_rows, dim, dim, update is not None
        self._launch(dense.norm, out, residual, norm.weight, float_bits(norm.eps), *sizes)
        return out, residual

    def add_norm(self, residual: Tensor, x: Tensor, norm: NormWeights) -> Tensor:
        self._launch(dense.add_norm, residual, x, norm.weight, float_bits(norm.eps), *x.shape)
        return residual

    def _norm_all_heads(self, qkv: Tensor, norm: QKNormWeights) -> None:
        """Normalize q and k in place, each over all heads of a token."""
        for weight, heads in ((norm.q, qkv), (norm.k, qkv[:, len(norm.q) :])):
            sizes = len(qkv), weight.numel(), qkv.stride(0), False
            self._launch(dense.norm, heads, heads, weight, float_bits(norm.eps), *sizes)

    def rope_write(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        rope: Tensor,
        positions: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> None:
        num_tokens, per_token, head_dim = qkv.shape
        block_size, num_kv_heads = cache.k.shape[1:3]
        if norm is not None and norm.is_over_all_heads:
            self._norm_all_heads(qkv, norm)
            norm = None
        fp8_args: list[Argument] = []
        if cache.k_exponents is not None:
            scratch = self.launcher.scratch(self.launcher.num_threads * head_dim)
            scales = (float_bits(2.0**exponent) for exponent in hadamard_exponents(head_dim))
            fp8_args = [*cache.parts[2:], scratch, hadamard_size(head_dim), *scales]
        self._launch(
            dense.rope_write,
            *(qkv, rope),
            *((None, None, None) if norm is None else (norm.q, norm.k, float_bits(norm.eps))),
            *(positions, slot_mapping, cache.k, cache.v),
            num_tokens,
            per_token - 2 * num_kv_heads,
            num_kv_heads,
            head_dim,
            block_size,
            rope.stride(0),
            qkv.stride(0),
            *fp8_args,
            other=cache.k.dtype,
        )

    gated_delta_net = gated_delta_net

    def act_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty(num_rows, size)
        curve = [float_bits(factor) for factor in ACTIVATIONS[activation]]
        self._launch(dense.act_and_mul, out, gate_up, num_rows, size, *curve)
        return out

    def multiply_sigmoid(self, x: Tensor, gate: Tensor, base: Tensor | None = None) -> Tensor:
        is_single = gate.shape[1] == 1
        self._launch(dense.multiply_sigmoid, x, gate, base, *x.shape, gate.stride(0), is_single)
        return x

    def scale_logits(self, logits: Tensor, scale: float, softcap: float | None) -> Tensor:
        factors = float_bits(scale), float_bits(softcap or 0.0)
        self._launch(dense.scale_logits, logits, logits.numel(), *factors)
        return logits

    def pack_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation | None, allow_copy: bool
    ) -> PackedLinear:
        if isinstance(weight, PanelWeight):
            return ComposedLinear(self, self.blocks.linear(weight, bias), activation)
        if isinstance(weight, QuantizedWeight):
            return compose_linear(self, weight, bias, activation)
        weight = weight.contiguous()
        run_many = self._pack_many(weight, bias, allow_copy)
        run = self._pack_few(weight, bias, run_many, self.launcher.dtype)
        return ComposedLinear(self, run, activation)

    def pack_lm_head(self, weight: Weight, allow_copy: bool) -> PackedLinear:
        out_dtype = torch.float32
        if self.launcher.dtype == out_dtype:
            return self.pack_linear(weight, None, None, allow_copy)
        if isinstance(weight, PanelWeight):
            return ComposedLinear(self, self._blocks_for(out_dtype).linear(weight, None), None)
        run_many = compose_linear(self, weight, None, None, out_dtype=out_dtype).linear
        if isinstance(weight, QuantizedWeight):
            return ComposedLinear(self, run_many, None)
        run = self._pack_few(weight.contiguous(), None, run_many, out_dtype)
        return ComposedLinear(self, run, None)

    def _pack_few(
        self, weight: Tensor, bias: Tensor | None, run_many: LinearFn, out_dtype: torch.dtype
    ) -> LinearFn:
        """Return a GEMM that runs our kernel for few rows, and `run_many` for many."""
        num_out, num_in = weight.shape
        max_rows = self.max_linear_rows
        num_threads = self.launcher.num_threads

        def run(x: Tensor) -> Tensor:
            num_rows = x.shape[0]
            if num_rows > max_rows:
                return run_many(x)
            x, y = x.contiguous(), self._empty(num_rows, num_out, dtype=out_dtype)
            scratch = self.launcher.scratch(num_threads * (num_rows * num_in + dense.TILE))
            sizes = num_rows, num_out, num_in
            self._launch(dense.linear, y, x, weight, bias, scratch, *sizes, other=out_dtype)
            return y

        return run

    def _pack_many(self, weight: Tensor, bias: Tensor | None, allow_copy: bool) -> LinearFn:
        """Choose the GEMM for many rows; packing pays off only if the weight has the GEMM dtype."""
        if allow_copy and self.can_pack and self.matmul_dtype == weight.dtype:
            return pack_onednn(weight, bias)
        return lambda x: linear(x, weight, bias, self.matmul_dtype)

    def pack_experts(self, gate_up: Weight, down: Weight, routing: Routing) -> PackedExperts:
        from nanovllm.devices.cpu.numba_experts import pack_experts

        return pack_experts(self, gate_up, down, routing)


def pack_onednn(weight: Tensor, bias: Tensor | None) -> LinearFn:
    """Return a GEMM with a weight packed for oneDNN once, instead of in every call."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x, packed, bias, "none", [], "")
