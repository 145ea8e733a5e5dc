"""Ops on CUDA: Triton where it beats the libraries, cuBLAS for products of many rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.devices.cuda.kernels import elementwise
from nanovllm.devices.cuda.kernels.dequantize import CudaWeight, dequantize
from nanovllm.devices.cuda.kernels.experts_grouped import run_grouped
from nanovllm.devices.cuda.kernels.experts_pairs import route, run_pairs
from nanovllm.devices.cuda.kernels.linear_few_rows import (
    FewRowsConfig,
    choose_splits,
    few_rows_config,
    few_rows_linear,
    has_few_rows,
    make_counters,
)
from nanovllm.devices.cuda.kernels.linear_fp8 import (
    LibraryWeight,
    fp8_add_to,
    fp8_after_norm,
    fp8_many_rows,
    library_weight,
)
from nanovllm.devices.cuda.kernels.linear_one_row import one_row_linear
from nanovllm.ops.interface import (
    Activation,
    NormWeights,
    PackedExperts,
    PackedLinear,
    ResidualStream,
    Routing,
)
from nanovllm.ops.quantized_weight import QuantizedWeight, Weight
from nanovllm.ops.torch_ops import ComposedLinear, TorchOps

ADD_ROWS = 1024  # from here on the product adds the residual itself, which saves the norm a pass
# Up to here, activations stay unquantized for FP8 weights with a scale per output: the gain would
# be small.
MAX_EXACT_ROWS = 16
# The same limit for FP8 weights with block scales, which are then dequantized in registers.
MAX_FP8_ROWS = 64
# With more rows, int4 weights are dequantized in memory first, which moves nine times their bytes.
MAX_INT4_ROWS = 1024
# With more tokens, enough of them share an expert for sorting to pay; quantized experts are always
# sorted, because tensor cores dequantize and multiply them faster.
MAX_PAIR_TOKENS = 4


class TritonOps:
    embed = staticmethod(TorchOps.embed)
    rope_write = staticmethod(elementwise.rope_write)
    act_and_mul = staticmethod(elementwise.act_and_mul)

    def norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        return elementwise.rms_norm(hidden, norm), hidden.residual

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

    def pack_experts(self, gate_up: Weight, down: Weight, routing: Routing) -> PackedExperts:
        if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            return CudaExperts(self, gate_up.contiguous(), down.contiguous(), routing)
        assert isinstance(gate_up, QuantizedWeight)
        assert isinstance(down, QuantizedWeight)
        return CudaExperts(self, gate_up, down, routing)


@dataclass(slots=True)
class CudaLinear:
    """A linear layer: a fused kernel for one row, another for a few, libraries for many rows."""

    ops: TritonOps
    weight: CudaWeight
    bias: Tensor | None
    activation: Activation | None
    library: LibraryWeight | None = None  # for products of many rows in FP8
    counters: Tensor | None = None  # for `few_rows_linear`, if the weight is quantized

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias, activation = self.weight, self.bias, self.activation
        if len(x) == 1 and isinstance(weight, Tensor):
            return one_row_linear(ResidualStream(x), None, weight, bias, activation)[0]
        x = x.contiguous()
        if (library := self._library_of(x)) is not None:
            return fp8_many_rows(x, library, bias, activation)
        if self._has_few(len(x)):
            return few_rows_linear(x, weight, bias, activation, self.counters)
        dense = weight if isinstance(weight, Tensor) else dequantize(weight, x.dtype)
        y = F.linear(x, dense, bias)
        return y if activation is None else self.ops.act_and_mul(y, activation)

    def add_to(self, residual: Tensor, x: Tensor) -> ResidualStream:
        assert self.activation is None
        if isinstance(self.weight, Tensor) and len(x) >= ADD_ROWS and self.bias is None:
            return ResidualStream(residual.addmm_(x, self.weight.t()))
        x = x.contiguous()
        if (library := self._library_of(x)) is not None:
            return fp8_add_to(residual, x, library, self.bias)
        config = self._split_config(len(x))
        if config is None:
            return ResidualStream(residual, self(x))
        return ResidualStream(
            residual, few_rows_linear(x, self.weight, self.bias, None, None, config)
        )

    def after_norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        residual, weight = hidden.residual, self.weight
        if len(residual) == 1 and isinstance(weight, Tensor):
            return one_row_linear(hidden, norm, weight, self.bias, self.activation)
        library = self._library_of(residual)
        if library is not None and not library.stored.has_blocks:
            return fp8_after_norm(hidden, norm, library, self.bias, self.activation), residual
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed), residual

    def _has_few(self, num_rows: int) -> bool:
        if isinstance(self.weight, Tensor):
            return has_few_rows(num_rows, self.weight)
        return num_rows <= (MAX_FP8_ROWS if self.weight.bits == 8 else MAX_INT4_ROWS)

    def _split_config(self, num_rows: int) -> FewRowsConfig | None:
        """Return the split-K config of a product whose partial sums the next norm adds up."""
        if isinstance(self.weight, Tensor):
            num_splits = choose_splits(num_rows, self.weight)
            return few_rows_config(self.weight, num_rows, num_splits) if num_splits > 1 else None
        is_split = num_rows > 1 and self._has_few(num_rows)
        return few_rows_config(self.weight, num_rows) if is_split else None

    def _library_of(self, x: Tensor) -> LibraryWeight | None:
        """Return the FP8 library weight if these rows are to be quantized to FP8."""
        if self.library is None or x.dtype != torch.bfloat16:
            return None
        most = MAX_FP8_ROWS if self.library.stored.has_blocks else MAX_EXACT_ROWS
        return self.library if len(x) > most else None


def pack_quantized(
    ops: TritonOps, weight: QuantizedWeight, bias: Tensor | None, activation: Activation | None
) -> CudaLinear:
    has_library = weight.bits == 8 and weight.qweight.is_cuda
    library = library_weight(weight) if has_library else None
    counters = make_counters(weight.qweight.device)
    return CudaLinear(ops, weight, bias, activation, library, counters)


@dataclass(frozen=True, slots=True)
class CudaExperts:
    """Routed experts: tokens are grouped by expert; a few tokens each read their own ones."""

    ops: TritonOps
    gate_up: CudaWeight
    down: CudaWeight
    routing: Routing

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        x, logits = x.contiguous(), logits.contiguous()
        if len(x) == 0:
            return x
        gate_up, down = self.gate_up, self.down
        if len(x) <= MAX_PAIR_TOKENS and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            ids, weights, _ = route(logits, self.routing)
            return run_pairs(x, ids, weights, gate_up, down)
        return run_grouped(x, logits, gate_up, down, self.routing)

    def after_norm(
        self, hidden: ResidualStream, norm: NormWeights, router: PackedLinear
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed, router(normed)), residual
