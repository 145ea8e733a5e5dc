"""The weights of projections while they are loaded: dense, or quantized as they are stored.

A layer names the outputs and inputs that it needs. Its weight makes the parameters, which may be
several tensors, and names the checkpoint's tensors that fill them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import nn

from nanovllm.kernels.quantized_weight import Weight
from nanovllm.layers.shards import ExpectedTensor, Share, expect_shares, expect_stack, num_outputs
from nanovllm.quantisation import QuantLayout

if TYPE_CHECKING:
    from nanovllm.layers.build import Build

# Output sizes of a weight by checkpoint name; one tensor may hold several outputs (q, k and v).
Outputs = dict[str, list[Share]]
Layouts = Callable[[str], QuantLayout | None]  # by module; None: dense, or to be dequantized


class LayerWeight(Protocol):
    """A module whose parameters are a weight [outputs, inputs] while it is loaded."""

    is_dense: bool  # known once `expected_tensors` was called

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        """Name the checkpoint's tensors (parent + "q_proj.weight"), and what this rank takes."""

    def expected_copy(self, name: str) -> dict[str, ExpectedTensor]:
        """Name a tensor that a checkpoint may hold as a second copy of this weight."""

    def use_dense(self) -> None:
        """Dequantize the weight while it is loaded."""

    def for_ops(self, num_experts: int | None = None) -> Weight:
        """The loaded weight as `Ops` takes it; with experts, the rows of each follow another's."""


def create_weight(
    outputs: Outputs, inputs: Share, build: Build, is_uniform: bool = False
) -> LayerWeight:
    """Make the weight of a projection, its outputs in this order.

    `is_uniform` refuses quantized tensors of several layouts.
    """
    if build.layouts is None:
        return DenseLayerWeight(outputs, inputs, build)
    from nanovllm.layers.quantized_weights import QuantizedLayerWeight

    return QuantizedLayerWeight(outputs, inputs, build.layouts, build, is_uniform)


class DenseLayerWeight(nn.Module):
    """One tensor [outputs, inputs] in the model's dtype."""

    is_dense = True

    def __init__(self, outputs: Outputs, inputs: Share, build: Build) -> None:
        super().__init__()
        self.outputs, self.inputs = outputs, inputs
        self.values = build.parameter(num_outputs(outputs), inputs.count)

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        tensors = expect_stack(self.values, self.outputs, self.inputs)
        return {f"{parent}{name}.weight": tensor for name, tensor in tensors.items()}

    def expected_copy(self, name: str) -> dict[str, ExpectedTensor]:
        [shares] = self.outputs.values()
        return {name: expect_shares(self.values, shares, self.inputs)}

    def use_dense(self) -> None:
        pass

    def for_ops(self, num_experts: int | None = None) -> Weight:
        shape = () if num_experts is None else (num_experts,)
        return self.values.view(*shape, -1, self.inputs.count)
