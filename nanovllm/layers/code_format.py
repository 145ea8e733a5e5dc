"""Quantised safetensors as they are stored: codes and scales, which a device's kernels read.

What has no kernel is widened while it is loaded, as by the plain format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nanovllm.kernels.ops import Activation, Ops, PackedExperts, PackedLinear, Routing
from nanovllm.layers.code_tensors import CodeTensors, Layouts, common_layout
from nanovllm.layers.plain_experts import PlainExperts
from nanovllm.layers.plain_format import PLAIN, PlainLinear
from nanovllm.layers.shards import ExpectedTensor, Share, num_outputs

if TYPE_CHECKING:
    from nanovllm.layers.build import Build
    from nanovllm.layers.weight_format import ExpertNames, Outputs


class CodeFormat:
    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts

    def linear(self, outputs: Outputs, inputs: Share, build: Build) -> CodeLinear:
        return CodeLinear(outputs, inputs, self.layouts, build)

    def table(self, outputs: Outputs, inputs: Share, build: Build) -> PlainLinear:
        return PLAIN.table(outputs, inputs, build)

    def experts(
        self, num_experts: int, names: ExpertNames, hidden: Share, size: Share, build: Build
    ) -> CodeExperts:
        return CodeExperts(num_experts, names, hidden, size, self.layouts, build)


class CodeLinear(nn.Module):
    """Codes and scales, or a plain weight: which, is clear once the names of its tensors are."""

    def __init__(self, outputs: Outputs, inputs: Share, layouts: Layouts, build: Build) -> None:
        super().__init__()
        self.outputs, self.inputs = outputs, inputs
        self.layouts, self.build = layouts, build
        self.plain: PlainLinear | None = None
        self.tensors: CodeTensors | None = None

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        found = [self.layouts(f"{parent}{name}") for name in self.outputs]
        layout = common_layout(found, self.inputs)
        if layout is None:
            self.plain = PLAIN.linear(self.outputs, self.inputs, self.build)
            return self.plain.expected_tensors(parent)
        self.tensors = CodeTensors(num_outputs(self.outputs), self.inputs, layout, self.build)
        expected, first = {}, 0
        for name, shares in self.outputs.items():
            expected[f"{parent}{name}.weight"] = self.tensors.expect(first, shares)
            first += sum(share.count for share in shares)
        return expected

    def pack(
        self, ops: Ops, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        if self.plain is not None:
            return self.plain.pack(ops, bias, activation, has_room)
        assert self.tensors is not None
        return ops.pack_codes(self.tensors.weight, bias, activation)


class CodeExperts(nn.Module):
    """Codes of all experts, or plain weights: which, is clear once there are names."""

    def __init__(
        self,
        num_experts: int,
        names: ExpertNames,
        hidden: Share,
        size: Share,
        layouts: Layouts,
        build: Build,
    ) -> None:
        super().__init__()
        self.num_experts, self.names = num_experts, names
        self.hidden, self.size = hidden, size
        self.layouts, self.build = layouts, build
        self.plain: PlainExperts | None = None
        self.gate_up: CodeTensors | None = None
        self.down: CodeTensors | None = None

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        names, hidden, size, count = self.names, self.hidden, self.size, self.num_experts
        modules = [f"{parent}experts.{i}." for i in range(count)]
        found = [self.layouts(f"{m}{name}") for m in modules for name in (names.gate, names.up)]
        gate_up = common_layout(found, hidden)
        down = common_layout([self.layouts(f"{m}{names.down}") for m in modules], size)
        if gate_up is None or down is None:
            self.plain = PlainExperts(count, names, hidden, size, self.build)
            return self.plain.expected_tensors(parent)
        self.gate_up = CodeTensors(2 * count * size.count, hidden, gate_up, self.build)
        self.down = CodeTensors(count * hidden.count, size, down, self.build)
        expected = {}
        for i, module in enumerate(modules):
            for j, name in enumerate((names.gate, names.up)):
                first = (2 * i + j) * size.count
                expected[f"{module}{name}.weight"] = self.gate_up.expect(first, [size])
            first = i * hidden.count
            expected[f"{module}{names.down}.weight"] = self.down.expect(first, [hidden])
        return expected

    def pack(self, ops: Ops, routing: Routing) -> PackedExperts:
        if self.plain is not None:
            return self.plain.pack(ops, routing)
        assert self.gate_up is not None
        assert self.down is not None
        return ops.pack_code_experts(self.gate_up.weight, self.down.weight, routing)
