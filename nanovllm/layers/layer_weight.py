"""The weights of projections during loading: dense, or quantized as in the checkpoint.

A layer specifies the outputs and inputs that it needs. Its weight creates the parameters, which may
be several tensors, and lists the checkpoint tensors that fill them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nanovllm.layers.quantized_weights import BlockTensors, WordTensors, create_quantized
from nanovllm.layers.shards import ExpectedTensor, Outputs, Shard, expect_stack, num_outputs
from nanovllm.ops.quantized_weight import Weight

if TYPE_CHECKING:
    from nanovllm.layers.build import BuildContext


class LayerWeight(nn.Module):
    """The weight of a projection; `outputs` defines the order of its rows.

    It stays quantized if the checkpoint stores all its tensors in layouts that the kernels read.
    With `is_uniform`, all tensors must also have the same layout.
    """

    def __init__(
        self, outputs: Outputs, inputs: Shard, build: BuildContext, is_uniform: bool = False
    ) -> None:
        super().__init__()
        self.outputs, self.inputs = outputs, inputs
        self.build, self.is_uniform = build, is_uniform
        self.tensors: DenseTensor | WordTensors | BlockTensors | None = None
        if build.layouts is None:
            self.use_dense()

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        """Return the expected checkpoint tensors, keyed by name (parent + "q_proj.weight")."""
        if self.tensors is None:
            self.tensors = create_quantized(
                self.outputs, self.inputs, self.build, parent, self.is_uniform
            )
        if self.tensors is None:
            self.use_dense()
        assert self.tensors is not None
        tensors = self.tensors.expected_tensors()
        return {f"{parent}{name}.weight": tensor for name, tensor in tensors.items()}

    @property
    def is_dense(self) -> bool:
        """Whether the weight is dense; valid once `expected_tensors` has been called."""
        return isinstance(self.tensors, DenseTensor)

    def use_dense(self) -> None:
        """Load the weight as a dense tensor; a quantized one is dequantized during loading."""
        self.tensors = DenseTensor(self.outputs, self.inputs, self.build)

    def reorder(self, rows: Tensor) -> None:
        """Move row rows[i] of the loaded weight to row i, within the same checkpoint tensor."""
        assert self.tensors is not None
        self.tensors.reorder(rows)

    def for_ops(self, num_experts: int | None = None) -> Weight:
        """Return the loaded weight for `Ops`; pass `num_experts` if the weight stacks experts."""
        assert self.tensors is not None
        return self.tensors.for_ops(num_experts)


class DenseTensor(nn.Module):
    """One tensor [outputs, inputs] in the model's dtype."""

    def __init__(self, outputs: Outputs, inputs: Shard, build: BuildContext) -> None:
        super().__init__()
        self.outputs, self.inputs = outputs, inputs
        self.values = build.parameter(num_outputs(outputs), inputs.count)

    def expected_tensors(self) -> dict[str, ExpectedTensor]:
        return expect_stack(self.values, self.outputs, self.inputs)

    def reorder(self, rows: Tensor) -> None:
        self.values.data = self.values.data[rows]

    def for_ops(self, num_experts: int | None = None) -> Weight:
        shape = () if num_experts is None else (num_experts,)
        return self.values.view(*shape, -1, self.inputs.count)
