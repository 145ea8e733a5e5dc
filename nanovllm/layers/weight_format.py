"""How a checkpoint stores the weights of projections; each format is a file of its own.

A layer says what it needs in numbers of outputs and inputs. The format makes the parameters, which
may be several tensors for each weight, says which tensors of the checkpoint fill them, and packs
them once they are loaded. It refuses a share that its tensors cannot be cut into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from nanovllm.kernels.ops import Activation, LinearFn, Ops, PackedExperts, PackedLinear, Routing
from nanovllm.layers.shards import ExpectedTensor, Share

if TYPE_CHECKING:
    from nanovllm.layers.build import Build

# The outputs of a weight by checkpoint name: one name may hold several, such as q, k and v.
Outputs = dict[str, list[Share]]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls an expert's projections."""

    gate: str
    up: str
    down: str


class LinearWeight(Protocol):
    """A module whose parameters are the weight of a projection, as they are loaded."""

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        """Name the checkpoint's tensors (parent + "q_proj.weight"), and what this rank takes."""

    def pack(
        self, ops: Ops, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        """Lay the weight out for its product, as Ops.pack_linear does."""


class TableWeight(LinearWeight, Protocol):
    """The weight of an embedding, [vocabulary, hidden], which may be that of the head as well."""

    def tied(self, outputs: Outputs) -> LinearWeight:
        """Return the same weight for the head, under its name in checkpoints."""

    def pack_table(self, ops: Ops, scale: float) -> LinearFn:
        """Lay the weight out for rows to be looked up, as Ops.embed does."""


class ExpertsWeight(Protocol):
    """A module whose parameters are the weights of all experts of a layer, as they are loaded."""

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        """Name the tensors (parent + "experts.0.up_proj.weight"), as LinearWeight does."""

    def pack(self, ops: Ops, routing: Routing) -> PackedExperts:
        """Lay the weights out for their products, as Ops.pack_experts does."""


class WeightFormat(Protocol):
    def linear(self, outputs: Outputs, inputs: Share, build: Build) -> LinearWeight:
        """Make the weight of a projection, its outputs in this order."""

    def table(self, outputs: Outputs, inputs: Share, build: Build) -> TableWeight:
        """Make the weight of an embedding."""

    def experts(
        self, num_experts: int, names: ExpertNames, hidden: Share, size: Share, build: Build
    ) -> ExpertsWeight:
        """Make the weights of all experts; gate and up project from hidden to size, down back."""
