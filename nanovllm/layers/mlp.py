"""The gated MLP: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedLinear, RowParallelLinear
from nanovllm.layers.shards import replicated, sharded
from nanovllm.ops.interface import ResidualStream


class GatedMLP(Layer):
    """A gated MLP; `merged` names the checkpoint weight that stores gate and up as one."""

    def __init__(self, config: ModelConfig, build: BuildContext, merged: str | None = None) -> None:
        super().__init__()
        size, bias = sharded(config.intermediate_size, build.group), config.mlp_bias
        outputs = {"gate_proj": [size], "up_proj": [size]}
        if merged is not None:
            outputs = {merged: [size, size]}
        inputs = replicated(config.hidden_size)
        self.gate_up_proj = MergedLinear(inputs, outputs, bias, build, config.activation)
        self.down_proj = RowParallelLinear(size, config.hidden_size, bias, build, "down_proj")

    def forward(self, hidden: ResidualStream, norm: RMSNorm) -> ResidualStream:
        gated, residual = self.gate_up_proj.after_norm(hidden, norm)
        return self.down_proj.add_to(residual, gated)
