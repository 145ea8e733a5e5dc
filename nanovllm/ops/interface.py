"""Ops: the work between attention calls, which a device may fuse or lay out as it likes."""

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

# Each is x * sigmoid(x * (a + b * x**2)); tanh(y) is 2 * sigmoid(2 * y) - 1.
GELU_SCALE = 2 * (2 / math.pi) ** 0.5
ACTIVATIONS: dict[Activation, tuple[float, float]] = {
    "silu": (1.0, 0.0),
    "gelu_tanh": (GELU_SCALE, GELU_SCALE * 0.044715),
}


class Sampling(IntFlag):
    """What a batch asks of its sampler, whatever one of its rows asks for."""

    GREEDY = 0
    NOISE = 1  # a temperature
    MIN_P = 2
    TOP = 4  # top_k or top_p


@dataclass(frozen=True, slots=True)
class NormWeights:
    """RMSNorm over the last dimension."""

    weight: Tensor  # float32, like every norm's: some need more digits than activations have
    eps: float


@dataclass(frozen=True, slots=True)
class QKNormWeights:
    """RMSNorm over every head of q and of k."""

    q: Tensor  # [head_dim]
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, each [num_blocks, block_size, kv_heads, head_dim].

    With exponents they are rows as `fp8_rows.py` has them, and keys are Hadamard-transformed.
    """

    k: Tensor
    v: Tensor
    k_exponents: Tensor | None = None  # [num_blocks, kv_heads, block_size], uint8
    v_exponents: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """All that a block has; of codes their bits, which every operation of torch takes."""
        parts = self.k, self.v, self.k_exponents, self.v_exponents
        known = [part for part in parts if part is not None]
        return known if len(known) == 2 else [part.view(uint8) for part in known]


class SumScales(NamedTuple):
    """What sums of codes [rows, outputs] are to be multiplied by."""

    rows: Tensor  # float32 [rows, 1]
    outputs: Tensor  # float32 [outputs, 1]

    def apply(self, sums: Tensor) -> Tensor:
        return sums.float() * self.rows * self.outputs.t()


class ResidualStream(NamedTuple):
    """The residual, and an update that is not added to it yet.

    The next norm adds them in the pass in which it reads them, and may overwrite both. A tuple,
    because every layer creates two, and a frozen dataclass takes twice as long.
    """

    residual: Tensor  # [tokens, hidden]
    # [tokens, hidden], or the partial sums of a split-K product: float32 [splits, tokens, hidden].
    update: Tensor | None = None
    scales: SumScales | None = None  # of an update that is sums of codes, [tokens, hidden]

    def select(self, tokens: Tensor) -> ResidualStream:
        """Copy the states of some tokens; the update of one is finished: see `after_norm`."""
        residual, scales = self.residual.index_select(0, tokens), self.scales
        update = None if self.update is None else self.update.index_select(-2, tokens)
        if scales is not None:
            scales = SumScales(scales.rows.index_select(0, tokens), scales.outputs)
        if update is not None and len(tokens) == 1:
            update = update if scales is None else scales.apply(update)
            update = update.sum(0) if update.dim() == 3 else update
            return ResidualStream(residual, update.to(residual.dtype))
        return ResidualStream(residual, update, scales)


class PackedLinear(Protocol):
    """A projection as the device runs it."""

    def __call__(self, x: Tensor) -> Tensor:
        """Project x [tokens, in]."""

    def add_to(self, residual: Tensor, x: Tensor) -> ResidualStream:
        """Project x to an update of the residual, which may also be added in place at once."""

    def after_norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """Project the RMSNorm of residual + update; return also that sum, the new residual.

        The update of a single token is neither partial sums nor sums of codes.
        """


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token goes to the top_k experts with the largest softmax of the router's logits."""

    top_k: int
    is_normalized: bool  # whether the weights of the chosen are made to sum to one


class PackedExperts(Protocol):
    """The experts of a layer, and the choice among them, as the device runs them."""

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        x is [tokens, hidden], logits are [tokens, experts] and of the same dtype.
        """

    def after_norm(
        self, hidden: ResidualStream, norm: NormWeights, router: PackedLinear
    ) -> tuple[Tensor, Tensor]:
        """Run the experts that the router chooses on the RMSNorm of residual + update.

        Return also that sum, the new residual.
        """


class Ops(Protocol):
    """`torch_ops.py` says in plain torch what each one computes."""

    def embed(self, token_ids: Tensor, table: Weight, scale: float) -> Tensor:
        """Return the rows of table [vocab_size, dim] that token_ids (int32) name, scaled."""

    def norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """Return the RMSNorm of residual + update, and that sum, the new residual."""

    def rope_write(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        rope: Tensor,
        positions: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> None:
        """Normalize and rotate q and k, spread both for codes; k and v go to the cache, q stays.

        qkv is [tokens, q + k + v heads, dim], and its k may be overwritten; rope holds cosines and
        sines in float32, [positions, 2, dim / 2]; slot_mapping count tokens.
        """

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up; gate_up [tokens, 2 * size] holds them side by side."""

    def pack_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        """Lay a weight [out, in] out for its product; `has_room` allows a second copy of it.

        One with an activation holds gate and up, and returns `gate` of what they give.
        """

    def pack_experts(self, gate_up: Weight, down: Weight, routing: Routing) -> PackedExperts:
        """Lay experts out, each of which is down(silu(gate(x)) * up(x)).

        Dense weights are gate_up [experts, 2 * size, hidden], each gate before its up, and down
        [experts, hidden, size]. Quantized ones have the same rows, one expert's after another's;
        either both weights are quantized or none.
        """


@runtime_checkable
class BlockOps(Ops, Protocol):
    """Ops whose products read GGUF's quant blocks."""

    def pack_blocks(self, kind: str, rows: Tensor) -> Panels:
        """Lay out the rows of quant blocks of each expert: [experts, rows, bytes]."""
