"""`Ops`: the operations of layers except attention; each device chooses its fusions and layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, uint8

from nanovllm.ops.quantized_weight import Panels, Weight

LinearFn = Callable[[Tensor], Tensor]
Activation = Literal["silu", "gelu_tanh"]

# Both activations are x * sigmoid(x * (a + b * x**2)), with these coefficients (a, b). For GELU,
# this follows from tanh(y) = 2 * sigmoid(2 * y) - 1.
GELU_SCALE = 2 * (2 / math.pi) ** 0.5
ACTIVATIONS: dict[Activation, tuple[float, float]] = {
    "silu": (1.0, 0.0),
    "gelu_tanh": (GELU_SCALE, GELU_SCALE * 0.044715),
}


class Sampling(IntFlag):
    """The sampling features that at least one row of the batch needs."""

    GREEDY = 0
    RANDOM = 1  # temperature above 0
    MIN_P = 2
    TOP_K_TOP_P = 4


@dataclass(frozen=True, slots=True)
class NormWeights:
    """RMSNorm over the last dimension."""

    weight: Tensor  # float32: some models need more precision than the activation dtype
    eps: float


@dataclass(frozen=True, slots=True)
class QKNormWeights:
    """RMSNorm over every head of q and of k, or over all heads of q and all heads of k."""

    q: Tensor  # [head_dim]; over all heads: [heads, head_dim]
    k: Tensor
    eps: float
    is_over_all_heads: bool = False


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, each [num_blocks, block_size, kv_heads, head_dim].

    If exponents are set, keys and values are FP8 (`fp8.py`), and keys are Hadamard-transformed.
    """

    k: Tensor
    v: Tensor
    k_exponents: Tensor | None = None  # [num_blocks, kv_heads, block_size], uint8
    v_exponents: Tensor | None = None
    group: int = 0  # index of the layer's group, which has its own block table and slot_mapping

    @property
    def parts(self) -> list[Tensor]:
        """All tensors of the cache; FP8 ones as bytes, which every torch operation supports."""
        parts = self.k, self.v, self.k_exponents, self.v_exponents
        tensors = [part for part in parts if part is not None]
        return tensors if len(tensors) == 2 else [part.view(uint8) for part in tensors]


@dataclass(frozen=True, slots=True)
class LayerState:
    """The recurrent states of one layer, by state id; a sequence's state has the id of its slot."""

    recurrent: Tensor  # float32 [states, value_heads, key_dim, value_dim]
    conv: Tensor  # [states, channels, conv_size - 1]: inputs of the last tokens, oldest first


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """The rows of a step whose states recurrent layers read and update."""

    slots: Tensor  # int64 [rows], on the device
    # Number of tokens of each row. None: one each, unless `chunks` is set.
    counts: list[int] | None = None
    # int32 [chunks, 4], see `split_chunks`. If it is set, CUDA kernels read nothing else.
    chunks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeltaNetInputs:
    """The projections of a Gated DeltaNet layer for the tokens of a step."""

    qkv: Tensor  # [tokens, channels], before the convolution
    z: Tensor  # [tokens, value_heads * value_dim]: gate of the output
    b: Tensor  # [tokens, value_heads]: sigmoid(b) is the weight of an update
    a: Tensor  # [tokens, value_heads]: determines the decay of the state


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """The weights of a Gated DeltaNet layer besides its projections, in float32 except `conv`."""

    conv: Tensor  # [channels, conv_size]
    decay: Tensor  # [value_heads]: -exp(A_log)
    dt_bias: Tensor  # [value_heads]
    norm: NormWeights  # over each head of the output: [value_dim]
    is_tiled: bool = False  # as in RecurrentConfig


class DequantScales(NamedTuple):
    """The scales still to be applied to the output of an FP8 GEMM [rows, outputs]."""

    rows: Tensor  # float32 [rows, 1]
    outputs: Tensor  # float32 [outputs, 1]

    def apply(self, sums: Tensor) -> Tensor:
        return sums.float() * self.rows * self.outputs.t()


class ResidualStream(NamedTuple):
    """The residual stream, and an update that is not yet added to it.

    The next norm adds the update while it reads both tensors, and may overwrite them. This class is
    a tuple because every layer creates two, and creating a frozen dataclass takes twice as long.
    """

    residual: Tensor  # [tokens, hidden]
    # [tokens, hidden], or the partial sums of a split-K GEMM: float32 [splits, tokens, hidden].
    update: Tensor | None = None
    scales: DequantScales | None = None  # set if the update is the unscaled output of an FP8 GEMM

    def select(self, tokens: Tensor) -> ResidualStream:
        """Copy the states of some tokens; the update of a single token is summed and scaled."""
        residual, scales = self.residual.index_select(0, tokens), self.scales
        update = None if self.update is None else self.update.index_select(-2, tokens)
        if scales is not None:
            scales = DequantScales(scales.rows.index_select(0, tokens), scales.outputs)
        if update is not None and len(tokens) == 1:
            update = update if scales is None else scales.apply(update)
            update = update.sum(0) if update.dim() == 3 else update
            return ResidualStream(residual, update.to(residual.dtype))
        return ResidualStream(residual, update, scales)


class PackedLinear(Protocol):
    """A projection in the layout that the device's kernels read."""

    def __call__(self, x: Tensor) -> Tensor:
        """Project x [tokens, in]."""

    def add_to(self, residual: Tensor, x: Tensor) -> ResidualStream:
        """Project x; return the result as an update, or add it to the residual in place."""

    def after_norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """Return the projection of the RMSNorm of residual + update, and the new residual.

        The new residual is residual + update. For a single token, the update must be summed and
        scaled already.
        """


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing of each token to the top_k experts with the largest router probabilities."""

    top_k: int
    is_normalized: bool  # whether the chosen experts' weights are scaled to sum to one


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token runs through, weighted by the sigmoid of a gate."""

    gate_up: PackedLinear
    down: PackedLinear
    gate: PackedLinear  # one output

    def add(self, ops: Ops, x: Tensor, y: Tensor) -> Tensor:
        """Add the expert's output for x to that of the other experts, y."""
        return ops.multiply_sigmoid(self.down(self.gate_up(x)), self.gate(x), y)


class PackedExperts(Protocol):
    """The experts of a layer and their routing, in the layout that the device's kernels read."""

    def __call__(self, x: Tensor, logits: Tensor, shared: SharedExpert | None = None) -> Tensor:
        """Return the weighted sum of each token's experts, plus the shared expert's output.

        x is [tokens, hidden]; logits are [tokens, experts], of the same dtype.
        """

    def after_norm(
        self,
        hidden: ResidualStream,
        norm: NormWeights,
        router: PackedLinear,
        shared: SharedExpert | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the experts' output for the RMSNorm of residual + update, and the new residual."""


class Ops(Protocol):
    """The operations of a device; `torch_ops.py` is the reference in plain torch."""

    def embed(self, token_ids: Tensor, table: Weight, scale: float) -> Tensor:
        """Return the rows of table [vocab_size, dim] at token_ids (int32), multiplied by scale."""

    def norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """Return RMSNorm(residual + update), and residual + update as the new residual."""

    def add_norm(self, residual: Tensor, x: Tensor, norm: NormWeights) -> Tensor:
        """Return residual + RMSNorm(x); both tensors may be overwritten."""

    def rope_write(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        rope: Tensor,
        positions: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> None:
        """Normalize and rotate q and k, write k and v to the cache, and leave q in qkv.

        With an FP8 cache, q and k are Hadamard-transformed too. qkv is [tokens, q + k + v heads,
        dim] with any stride(0), and its k may be overwritten. rope holds float32 cosines and sines
        for both, [positions, 2, dim / 2], or first for k, then for q: [positions, 4, dim / 2].
        slot_mapping holds positions in the cache, in units of tokens.
        """

    def gated_delta_net(
        self,
        inputs: DeltaNetInputs,
        weights: DeltaNetWeights,
        state: LayerState,
        rows: RecurrentRows,
    ) -> Tensor:
        """Return [tokens, value_heads * value_dim], and update the states of the rows in place."""

    def act_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up; gate_up [tokens, 2 * size] holds gate, then up."""

    def multiply_sigmoid(self, x: Tensor, gate: Tensor, base: Tensor | None = None) -> Tensor:
        """Return base + x * sigmoid(gate); gate is [tokens, size] or [tokens, 1].

        The gate may have any stride(0); without base, 0 is used. x and base may be overwritten.
        """

    def scale_logits(self, logits: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Return x = scale * logits, or softcap * tanh(x / softcap); may overwrite the logits."""

    def pack_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation | None, allow_copy: bool
    ) -> PackedLinear:
        """Lay out a weight [out, in] for its GEMM; `allow_copy` allows a second copy of it.

        With an activation, the weight holds gate and up, and the projection returns the result of
        `act_and_mul`.
        """

    def pack_lm_head(self, weight: Weight, allow_copy: bool) -> PackedLinear:
        """Lay out the LM head's weight [vocab_size, hidden]; its logits are float32.

        Rounded to 16 bits, the two largest logits of a row are often equal.
        """

    def pack_experts(self, gate_up: Weight, down: Weight, routing: Routing) -> PackedExperts:
        """Lay out experts, each of which computes down(silu(gate(x)) * up(x)).

        Dense weights are gate_up [experts, 2 * size, hidden], each expert's gate before its up, and
        down [experts, hidden, size]. Quantized weights hold the same rows, expert by expert. Either
        both weights are quantized or neither is.
        """


@runtime_checkable
class BlockOps(Ops, Protocol):
    """Ops whose kernels read GGUF quant blocks."""

    def pack_blocks(self, kind: str, rows: Tensor) -> Panels:
        """Lay out `rows` of GGUF quant blocks, [experts, rows, bytes], for the kernels."""
