"""Projections: one weight, or several checkpoint weights stacked so that one product serves all."""

from __future__ import annotations

from torch import Tensor

from nanovllm.kernels.ops import Activation, Hidden, PackedLinear
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.shards import ExpectedTensor, Share, expect_stack, num_outputs, whole
from nanovllm.layers.weights import LayerWeight, Outputs, create_weight


class MergedLinear(Layer):
    """Projects to several outputs at once, such as q, k and v, or gate and up.

    One with an activation returns activation(gate) * up.
    """

    packed: PackedLinear  # once it is loaded

    def __init__(
        self,
        inputs: Share,
        outputs: Outputs,
        bias: bool,
        build: Build,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.activation = inputs, outputs, activation
        self.weight: LayerWeight = create_weight(outputs, inputs, build)
        self.bias = build.parameter(num_outputs(outputs)) if bias else None
        self.ops = build.ops

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)

    def after_norm(self, hidden: Hidden, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Project the norm of hidden; return also the residual, to which its update is added."""
        return self.packed.after_norm(hidden, norm.weights)

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        parent = path[: path.rfind(".") + 1]
        tensors = self.weight.expected_tensors(parent)
        if self.bias is not None:
            biases = expect_stack(self.bias, self.outputs)
            tensors |= {f"{parent}{name}.bias": tensor for name, tensor in biases.items()}
        return tensors

    def pack(self, has_room: bool) -> None:
        weight = self.weight.for_ops()
        self.packed = self.ops.pack_linear(weight, self.bias, self.activation, has_room)
        del self.weight


class RowParallelLinear(MergedLinear):
    """A projection of what is spread over the ranks; their results are added up."""

    def __init__(
        self, inputs: Share, out_features: int, bias: bool, build: Build, name: str
    ) -> None:
        super().__init__(inputs, {name: [whole(out_features)]}, bias, build)
        self.group = build.group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.packed(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Hidden:
        """Project x, for the next norm to add it to the residual."""
        if self.group.is_alone:
            return self.packed.add_to(residual, x)
        return Hidden(residual, self(x))  # every rank has the residual: their sum must not

    def pack(self, has_room: bool) -> None:
        if self.group.rank > 0:
            self.bias = None  # rank 0 adds it
        super().pack(has_room)
