"""Inputs of Gated DeltaNet operations, from a layer of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanovllm.ops.interface import (
    DeltaNetInputs,
    DeltaNetWeights,
    LayerState,
    NormWeights,
    Ops,
    RecurrentRows,
)


class DeltaNetCase:
    """The weights of a layer of transformers, without its last projection."""

    def __init__(self, layer: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.layer, self.dtype, self.device = layer, dtype, device
        norm = NormWeights(layer.norm.weight.data.to(device), layer.layer_norm_epsilon)
        self.weights = DeltaNetWeights(
            layer.conv1d.weight.data.squeeze(1).to(device, dtype),
            -layer.A_log.data.exp().to(device),
            layer.dt_bias.data.to(device),
            norm,
        )

    def inputs(self, x: Tensor) -> DeltaNetInputs:
        """Project x; as in the model, qkv and z are parts of one tensor, and so are b and a."""
        layer = self.layer
        qkvz = torch.cat((layer.in_proj_qkv(x), layer.in_proj_z(x)), 1).to(self.device, self.dtype)
        ba = torch.cat((layer.in_proj_b(x), layer.in_proj_a(x)), 1).to(self.device, self.dtype)
        qkv, z = qkvz.split((layer.conv_dim, layer.value_dim), dim=1)
        b, a = ba.chunk(2, dim=1)
        return DeltaNetInputs(qkv, z, b, a)

    def run(self, ops: Ops, x: Tensor, state: LayerState, rows: RecurrentRows) -> Tensor:
        return ops.gated_delta_net(self.inputs(x), self.weights, state, rows)


def random_state(case: DeltaNetCase, num_states: int, seed: int = 0) -> LayerState:
    generator, layer = torch.Generator().manual_seed(seed), case.layer
    shape = num_states, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    conv_shape = num_states, layer.conv_dim, layer.conv_kernel_size - 1
    recurrent, conv = (torch.randn(each, generator=generator) for each in (shape, conv_shape))
    return LayerState(recurrent.to(case.device), conv.to(case.device, case.dtype))
