"""The plain weight format: one tensor [outputs, inputs] in the model's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nanovllm.kernels.ops import Activation, LinearFn, Ops, PackedLinear
from nanovllm.layers.plain_experts import PlainExperts
from nanovllm.layers.shards import ExpectedTensor, Share, expect_stack, num_outputs

if TYPE_CHECKING:
    from nanovllm.layers.build import Build
    from nanovllm.layers.weight_format import ExpertNames, Outputs


class PlainFormat:
    def linear(self, outputs: Outputs, inputs: Share, build: Build) -> PlainLinear:
        values = build.parameter(num_outputs(outputs), inputs.count)
        return PlainLinear(outputs, inputs, values)

    def table(self, outputs: Outputs, inputs: Share, build: Build) -> PlainLinear:
        return self.linear(outputs, inputs, build)

    def experts(
        self, num_experts: int, names: ExpertNames, hidden: Share, size: Share, build: Build
    ) -> PlainExperts:
        return PlainExperts(num_experts, names, hidden, size, build)


PLAIN = PlainFormat()


class PlainLinear(nn.Module):
    def __init__(self, outputs: Outputs, inputs: Share, values: nn.Parameter) -> None:
        super().__init__()
        self.outputs, self.inputs, self.values = outputs, inputs, values

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        tensors = expect_stack(self.values, self.outputs, self.inputs)
        return {f"{parent}{name}.weight": tensor for name, tensor in tensors.items()}

    def tied(self, outputs: Outputs) -> PlainLinear:
        return PlainLinear(outputs, self.inputs, self.values)

    def pack(
        self, ops: Ops, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        return ops.pack_linear(self.values, bias, activation, has_room)

    def pack_table(self, ops: Ops, scale: float) -> LinearFn:
        return lambda token_ids: ops.embed(token_ids, self.values, scale)
