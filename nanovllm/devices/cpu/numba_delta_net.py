"""Gated DeltaNet on the CPU: one kernel runs all tokens of each row and updates its state."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.devices.cpu.kernels import delta_net
from nanovllm.devices.cpu.program import float_bits
from nanovllm.ops.interface import DeltaNetInputs, DeltaNetWeights, LayerState, RecurrentRows

if TYPE_CHECKING:
    from nanovllm.devices.cpu.ops import NumbaOps


def gated_delta_net(
    ops: NumbaOps,
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    state: LayerState,
    rows: RecurrentRows,
) -> Tensor:
    launcher = ops.launcher
    _, num_heads, key_dim, value_dim = state.recurrent.shape
    num_channels, conv_size = weights.conv.shape
    key_heads = (num_channels - num_heads * value_dim) // (2 * key_dim)
    parts = inputs.qkv, inputs.z, inputs.b, inputs.a
    offsets = None if rows.counts is None else torch.tensor([0, *accumulate(rows.counts)])
    out = launcher.empty(*inputs.z.shape)
    scratch = launcher.scratch(launcher.num_threads * 2 * (key_dim + value_dim))
    launcher.launch(
        delta_net.gated_delta_net,
        out,
        *parts,
        *(part.stride(0) for part in parts),
        *(weights.conv, weights.decay, weights.dt_bias),
        *(weights.norm.weight, float_bits(weights.norm.eps)),
        *(state.recurrent, state.recurrent.stride(0)),
        *(state.conv, state.conv.stride(0)),
        *(rows.slots, offsets, scratch),
        *(len(rows.slots), key_heads, num_heads // key_heads, key_dim, value_dim, conv_size),
        weights.is_tiled,
    )
    return out
