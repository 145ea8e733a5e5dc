"""Gated DeltaNet: linear attention, with a recurrent state instead of cached keys and values."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext, ForwardBatch, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedLinear, RowParallelLinear
from nanovllm.layers.shards import (
    ExpectedTensor,
    Outputs,
    expect_replicated,
    expect_shards,
    replicated,
    sharded,
)
from nanovllm.ops.interface import (
    DeltaNetInputs,
    DeltaNetWeights,
    LayerState,
    NormWeights,
    ResidualStream,
)


class GatedDeltaNet(Layer):
    """Gated DeltaNet; every rank has some of the key heads, and the value heads that share them.

    With `is_grouped`, the checkpoint has only two input projections, in_proj_qkvz and in_proj_ba,
    and stores their rows key head by key head.
    """

    weights: DeltaNetWeights  # set by `process_weights_after_loading`

    def __init__(
        self, config: ModelConfig, layer_index: int, build: BuildContext, is_grouped: bool = False
    ) -> None:
        super().__init__()
        assert config.recurrent is not None
        sizes = config.recurrent
        self.layer_index, self.is_last = layer_index, layer_index + 1 == len(config.layers)
        self.ops, self.eps, self.is_tiled = build.ops, config.rms_norm_eps, sizes.is_tiled
        key_heads, heads = (
            sharded(number, build.group) for number in (sizes.num_key_heads, sizes.num_value_heads)
        )
        k, v = key_heads.times(sizes.key_dim), heads.times(sizes.value_dim)
        self.heads, self.channels = heads, [k, k, v]
        self.num_channels = 2 * k.count + v.count
        self.widths = [self.num_channels, v.count, heads.count, heads.count]
        inputs: Outputs = {"in_proj_qkv": [k, k, v], "in_proj_z": [v]}
        gates: Outputs = {"in_proj_b": [heads], "in_proj_a": [heads]}
        input_order = gate_order = None
        if is_grouped:
            group = sizes.num_value_heads // sizes.num_key_heads
            dims = [sizes.key_dim, sizes.key_dim, *[group * sizes.value_dim] * 2]
            inputs = {"in_proj_qkvz": [key_heads.times(sum(dims))]}
            gates = {"in_proj_ba": [key_heads.times(2 * group)]}
            input_order = ungroup(key_heads.count, dims)
            gate_order = ungroup(key_heads.count, [group, group])
        hidden = replicated(config.hidden_size)
        self.gate_proj: MergedLinear | None = None
        if build.layouts is not None:  # quantized checkpoints may leave the gates dense
            self.gate_proj = MergedLinear(hidden, gates, False, build, row_order=gate_order)
        else:
            inputs |= gates
            if input_order is not None and gate_order is not None:
                input_order += [len(input_order) + i for i in gate_order]
        self.in_proj = MergedLinear(hidden, inputs, False, build, row_order=input_order)
        self.o_proj = RowParallelLinear(v, config.hidden_size, False, build, "out_proj")
        self.conv = build.parameter(self.num_channels, 1, sizes.conv_size)
        self.log_decay, self.dt_bias = (
            build.parameter(heads.count, dtype=torch.float32) for _ in range(2)
        )
        self.norm = build.parameter(sizes.value_dim, dtype=torch.float32)

    def forward(
        self, hidden: ResidualStream, norm: RMSNorm, rope: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the heads, before `o_proj`, and the residual."""
        if self.gate_proj is None:
            y, residual = self.in_proj.after_norm(hidden, norm)
            parts = y.split(self.widths, dim=1)
        else:
            x, residual = self.ops.norm(hidden, norm.weights)
            qkvz, gates = self.in_proj(x), self.gate_proj(x)
            parts = *qkvz.split(self.widths[:2], dim=1), *gates.split(self.widths[2:], dim=1)
        inputs = DeltaNetInputs(*parts)
        state, rows = batch.caches[self.layer_index], batch.recurrent
        assert isinstance(state, LayerState)
        assert rows is not None
        output = self.ops.gated_delta_net(inputs, self.weights, state, rows)
        # In the last layer, tokens without logits only need to update the state.
        if self.is_last and (sampled := batch.sampled) is not None:
            output, residual = output[sampled.index], residual[sampled.index]
        return output, residual

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        conv_size = replicated(self.conv.shape[-1])
        return {
            f"{path}.conv1d.weight": expect_shards(
                self.conv, self.channels, replicated(1), conv_size
            ),
            f"{path}.A_log": expect_shards(self.log_decay, [self.heads]),
            f"{path}.dt_bias": expect_shards(self.dt_bias, [self.heads]),
            f"{path}.norm.weight": expect_replicated(self.norm),
        }

    def process_weights_after_loading(self, allow_copy: bool) -> None:
        norm = NormWeights(self.norm.data, self.eps)
        decay = -self.log_decay.data.exp()
        tensors = self.conv.data.squeeze(1), decay, self.dt_bias.data
        self.weights = DeltaNetWeights(*tensors, norm, self.is_tiled)


def ungroup(num_groups: int, parts: list[int]) -> list[int]:
    """Return the row permutation from group-major to part-major order.

    Every group consists of the same parts; `parts` holds the number of rows of each.
    """
    firsts = accumulate(parts, initial=0)
    return [
        group * sum(parts) + first + i
        for first, size in zip(firsts, parts, strict=False)
        for group in range(num_groups)
        for i in range(size)
    ]
