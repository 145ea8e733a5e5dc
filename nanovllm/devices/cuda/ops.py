"""Ops on CUDA: Triton kernels where they beat the libraries, cuBLAS for GEMMs with many rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.devices.cuda.kernels import delta_net, elementwise
from nanovllm.devices.cuda.kernels.dequantize import CudaWeight, dequantize
from nanovllm.devices.cuda.kernels.experts_grouped import run_grouped
from nanovllm.devices.cuda.kernels.experts_pairs import SharedWeights, route, run_pairs
from nanovllm.devices.cuda.kernels.linear_few_rows import (
    FewRowsConfig,
    choose_splits,
    few_rows_config,
    few_rows_linear,
    has_few_rows,
    make_counters,
)
from nanovllm.devices.cuda.kernels.linear_fp8 import (
    ScaledMMWeight,
    fp8_add_to,
    fp8_after_norm,
    fp8_many_rows,
    scaled_mm_weight,
)
from nanovllm.devices.cuda.kernels.linear_one_row import one_row_linear
from nanovllm.ops.interface import (
    Activation,
    NormWeights,
    PackedExperts,
    PackedLinear,
    ResidualStream,
    Routing,
    SharedExpert,
)
from nanovllm.ops.quantized_weight import QuantizedWeight, Weight
from nanovllm.ops.torch_ops import ComposedLinear, TorchOps

# Minimum rows to fuse the residual add into the GEMM (addmm); the norm then reads one tensor fewer.
MIN_FUSED_ADD_ROWS = 1024
# FP8 weights with per-channel scales: up to this many rows, quantizing activations gains little.
MAX_W8A16_ROWS = 16
# Other FP8 weights (block-wise scales, or not supported by torch._scaled_mm): up to this many rows,
# they are dequantized in registers.
MAX_FP8_ROWS = 64
# Int4 weights: with more rows, they are dequantized to memory, at nine times the memory traffic.
MAX_INT4_ROWS = 1024
# MoE: with more tokens, enough of them share an expert that sorting by expert pays off. With
# quantized weights tokens are always sorted, because tensor cores multiply such weights faster.
MAX_PAIR_TOKENS = 4


class TritonOps:
    embed = staticmethod(TorchOps.embed)
    scale_logits = staticmethod(TorchOps.scale_logits)
    rope_write = staticmethod(elementwise.rope_write)
    gated_delta_net = staticmethod(delta_net.gated_delta_net)
    multiply_sigmoid = staticmethod(elementwise.multiply_sigmoid)
    act_and_mul = staticmethod(elementwise.act_and_mul)

    def norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        return elementwise.rms_norm(hidden, norm), hidden.residual

    def add_norm(self, residual: Tensor, x: Tensor, norm: NormWeights) -> Tensor:
        return elementwise.rms_norm(ResidualStream(x), norm, residual)

    def pack_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation | None, allow_copy: bool
    ) -> PackedLinear:
        if isinstance(weight, QuantizedWeight):
            return pack_quantized(self, weight, bias, activation)
        assert isinstance(weight, Tensor)
        weight = weight.contiguous()
        if weight.dtype == torch.float32:
            return ComposedLinear(self, lambda x: F.linear(x, weight, bias), activation)
        return CudaLinear(self, weight, bias, activation)

    def pack_lm_head(self, weight: Weight, allow_copy: bool) -> PackedLinear:
        packed = self.pack_linear(weight, None, None, allow_copy)
        if isinstance(packed, CudaLinear):
            # The library's FP8 GEMMs with scales return 16 bits, so activations stay unquantized.
            return replace(packed, scaled_mm=None, out_dtype=torch.float32)
        return packed

    def pack_experts(self, gate_up: Weight, down: Weight, routing: Routing) -> PackedExperts:
        if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            return CudaExperts(self, gate_up.contiguous(), down.contiguous(), routing)
        assert isinstance(gate_up, QuantizedWeight)
        assert isinstance(down, QuantizedWeight)
        return CudaExperts(self, gate_up, down, routing)


@dataclass(slots=True)
class CudaLinear:
    """A linear layer: GEMV for one row, a skinny-GEMM kernel for a few rows, libraries for many."""

    ops: TritonOps
    weight: CudaWeight
    bias: Tensor | None
    activation: Activation | None
    scaled_mm: ScaledMMWeight | None = None  # weight for FP8 GEMMs with many rows
    counters: Tensor | None = None  # split-K counters of `few_rows_linear` for quantized weights
    out_dtype: torch.dtype | None = None  # float32 for logits; None: the dtype of the input

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias, activation = self.weight, self.bias, self.activation
        out_dtype = self.out_dtype
        if len(x) == 1:
            hidden = ResidualStream(x)
            return one_row_linear(hidden, None, weight, bias, activation, out_dtype=out_dtype)[0]
        x = x.contiguous()
        if (scaled_mm := self._scaled_mm_of(x)) is not None:
            return fp8_many_rows(x, scaled_mm, bias, activation)
        if self._has_few(len(x)):
            return few_rows_linear(x, weight, bias, activation, self.counters, out_dtype=out_dtype)
        dense = weight if isinstance(weight, Tensor) else dequantize(weight, x.dtype)
        if out_dtype is not None:
            assert bias is None
            return torch.mm(x, dense.t(), out_dtype=out_dtype)
        y = F.linear(x, dense, bias)
        return y if activation is None else self.ops.act_and_mul(y, activation)

    def add_to(self, residual: Tensor, x: Tensor) -> ResidualStream:
        assert self.activation is None
        if isinstance(self.weight, Tensor) and len(x) >= MIN_FUSED_ADD_ROWS and self.bias is None:
            return ResidualStream(residual.addmm_(x, self.weight.t()))
        x = x.contiguous()
        if (scaled_mm := self._scaled_mm_of(x)) is not None:
            return fp8_add_to(residual, x, scaled_mm, self.bias)
        config = self._split_config(len(x))
        if config is None:
            return ResidualStream(residual, self(x))
        return ResidualStream(
            residual, few_rows_linear(x, self.weight, self.bias, None, None, config)
        )

    def after_norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        residual = hidden.residual
        if len(residual) == 1:
            return one_row_linear(
                hidden, norm, self.weight, self.bias, self.activation, out_dtype=self.out_dtype
            )
        scaled_mm = self._scaled_mm_of(residual)
        if scaled_mm is not None and not scaled_mm.stored.has_blocks:
            return fp8_after_norm(hidden, norm, scaled_mm, self.bias, self.activation), residual
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed), residual

    def _has_few(self, num_rows: int) -> bool:
        if isinstance(self.weight, Tensor):
            return has_few_rows(num_rows, self.weight)
        return num_rows <= (MAX_FP8_ROWS if self.weight.bits == 8 else MAX_INT4_ROWS)

    def _split_config(self, num_rows: int) -> FewRowsConfig | None:
        """Return the config of a split-K GEMM whose partial sums the next norm adds up, or None."""
        if isinstance(self.weight, Tensor):
            num_splits = choose_splits(num_rows, self.weight)
            return few_rows_config(self.weight, num_rows, num_splits) if num_splits > 1 else None
        is_split = num_rows > 1 and self._has_few(num_rows)
        return few_rows_config(self.weight, num_rows) if is_split else None

    def _scaled_mm_of(self, x: Tensor) -> ScaledMMWeight | None:
        """Return the weight for torch._scaled_mm if x is to be quantized to FP8, else None."""
        if self.scaled_mm is None or x.dtype != torch.bfloat16:
            return None
        most = MAX_FP8_ROWS if self.scaled_mm.stored.has_blocks else MAX_W8A16_ROWS
        return self.scaled_mm if len(x) > most else None


def pack_quantized(
    ops: TritonOps, weight: QuantizedWeight, bias: Tensor | None, activation: Activation | None
) -> CudaLinear:
    has_scaled_mm = weight.bits == 8 and weight.qweight.is_cuda
    scaled_mm = scaled_mm_weight(weight) if has_scaled_mm else None
    counters = make_counters(weight.qweight.device)
    return CudaLinear(ops, weight, bias, activation, scaled_mm, counters)


@dataclass(frozen=True, slots=True)
class CudaExperts:
    """An MoE layer: `run_pairs` for a few tokens and dense weights, else `run_grouped`."""

    ops: TritonOps
    gate_up: CudaWeight
    down: CudaWeight
    routing: Routing

    def __call__(self, x: Tensor, logits: Tensor, shared: SharedExpert | None = None) -> Tensor:
        x, logits = x.contiguous(), logits.contiguous()
        if len(x) == 0:
            return x
        gate_up, down = self.gate_up, self.down
        if len(x) <= MAX_PAIR_TOKENS and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            ids, weights, _ = route(logits, self.routing)
            joined = None if shared is None else shared_weights(shared, down.shape[2])
            y = run_pairs(x, ids, weights, gate_up, down, joined)
            if joined is not None:
                return y
        else:
            y = run_grouped(x, logits, gate_up, down, self.routing)
        return y if shared is None else shared.add(self.ops, x, y)

    def after_norm(
        self,
        hidden: ResidualStream,
        norm: NormWeights,
        router: PackedLinear,
        shared: SharedExpert | None = None,
    ) -> tuple[Tensor, Tensor]:
        is_one = len(hidden.residual) == 1
        if is_one and isinstance(router, CudaLinear) and isinstance(router.weight, Tensor):
            normed, parts = torch.empty_like(hidden.residual), (router.weight, router.bias)
            logits, residual = one_row_linear(hidden, norm, *parts, None, normed=normed)
        else:
            normed, residual = self.ops.norm(hidden, norm)
            logits = router(normed)
        return self(normed, logits, shared), residual


def shared_weights(shared: SharedExpert, size: int) -> SharedWeights | None:
    """Return the weights of a shared expert, or None if `run_pairs` does not support it.

    The weights must be dense and without biases, the activation must be SiLU, and the intermediate
    size must be that of the other experts, `size`.
    """
    linears = [
        each
        for each in (shared.gate_up, shared.down, shared.gate)
        if isinstance(each, CudaLinear) and each.bias is None
    ]
    weights = [each.weight for each in linears if isinstance(each.weight, Tensor)]
    if len(weights) < 3 or weights[1].shape[1] != size or linears[0].activation != "silu":
        return None
    return SharedWeights(*weights)
