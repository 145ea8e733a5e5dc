"""Random inputs, weights and states of Gated DeltaNet layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanovllm.config import RecurrentConfig
from nanovllm.ops.interface import (
    DeltaNetInputs,
    DeltaNetWeights,
    LayerState,
    NormWeights,
    Ops,
    RecurrentRows,
)


def random_inputs(
    sizes: RecurrentConfig, num_tokens: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[DeltaNetInputs, DeltaNetWeights]:
    generator = torch.Generator().manual_seed(num_tokens)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    channels, heads = sizes.num_channels, sizes.num_value_heads
    qkvz = make(num_tokens, channels + heads * sizes.value_dim).to(dtype)
    ba = (3 * make(num_tokens, 2 * heads)).to(dtype)
    weights = DeltaNetWeights(
        make(channels, sizes.conv_size).to(dtype),
        -make(heads).exp(),
        make(heads),
        NormWeights(make(sizes.value_dim), 1e-3),
        sizes.is_tiled,
    )
    return split_inputs(qkvz, ba, channels), weights


def split_inputs(qkvz: Tensor, ba: Tensor, num_channels: int) -> DeltaNetInputs:
    """As in the model, qkv and z are parts of one tensor, and so are b and a."""
    b, a = ba.chunk(2, dim=1)
    return DeltaNetInputs(qkvz[:, :num_channels], qkvz[:, num_channels:], b, a)


def random_state(
    sizes: RecurrentConfig, num_states: int, dtype: torch.dtype, device: str = "cpu"
) -> LayerState:
    """Return states that are apart, as the states of a layer are in those of a whole model."""
    generator = torch.Generator().manual_seed(num_states)
    shape = sizes.num_value_heads, sizes.key_dim, sizes.value_dim
    conv_shape = sizes.num_channels, sizes.conv_size - 1
    recurrent, conv = (
        torch.randn(num_states, 2, *each, generator=generator)[:, 1] for each in (shape, conv_shape)
    )
    return LayerState(recurrent.to(device), conv.to(device, dtype))


class DeltaNetCase:
    """The weights of a layer of transformers, without its last projection."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.weights = DeltaNetWeights(
            layer.conv1d.weight.data.squeeze(1),
            -layer.A_log.data.exp(),
            layer.dt_bias.data,
            NormWeights(layer.norm.weight.data, layer.layer_norm_epsilon),
        )
        self.sizes = RecurrentConfig(
            frozenset(),
            layer.num_k_heads,
            layer.num_v_heads,
            layer.head_k_dim,
            layer.head_v_dim,
            layer.conv_kernel_size,
        )

    def run(self, ops: Ops, x: Tensor, state: LayerState, rows: RecurrentRows) -> Tensor:
        layer = self.layer
        qkvz = torch.cat((layer.in_proj_qkv(x), layer.in_proj_z(x)), 1)
        ba = torch.cat((layer.in_proj_b(x), layer.in_proj_a(x)), 1)
        inputs = split_inputs(qkvz, ba, layer.conv_dim)
        return ops.gated_delta_net(inputs, self.weights, state, rows)
