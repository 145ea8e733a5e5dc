"""Random inputs, weights and states of Gated DeltaNet layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

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
from nanovllm.ops.torch_delta_net import HeadTokens, normalize, run_token


def num_channels(sizes: RecurrentConfig) -> int:
    """Return the number of inputs of the convolution: those of q, k and v."""
    return 2 * sizes.num_key_heads * sizes.key_dim + sizes.num_value_heads * sizes.value_dim


def random_inputs(
    sizes: RecurrentConfig, num_tokens: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[DeltaNetInputs, DeltaNetWeights]:
    generator = torch.Generator().manual_seed(num_tokens)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    channels, heads = num_channels(sizes), sizes.num_value_heads
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


def split_inputs(qkvz: Tensor, ba: Tensor, channels: int) -> DeltaNetInputs:
    """As in the model, qkv and z are parts of one tensor, and so are b and a."""
    b, a = ba.chunk(2, dim=1)
    return DeltaNetInputs(qkvz[:, :channels], qkvz[:, channels:], b, a)


def random_state(
    sizes: RecurrentConfig, num_states: int, dtype: torch.dtype, device: str = "cpu"
) -> LayerState:
    """Return states that are apart, as the states of a layer are in those of a whole model."""
    generator = torch.Generator().manual_seed(num_states)
    shape = sizes.num_value_heads, sizes.key_dim, sizes.value_dim
    conv_shape = num_channels(sizes), sizes.conv_size - 1
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


@contextmanager
def exact_delta_rules() -> Iterator[None]:
    """Make transformers run the delta rule of float64 models in float64: it always uses float32."""
    # Imported here, because the kernels run in a process that does not need transformers.
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
    from transformers.models.qwen3_next import modeling_qwen3_next

    with ExitStack() as stack:
        for module in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next):
            name = "torch_chunk_gated_delta_rule"
            rule = partial(_run_rule, getattr(module, name))
            stack.enter_context(patch.object(module, name, rule))
        yield


def _run_rule(
    rule: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    if v.dtype != torch.float64:
        result: tuple[Tensor, Tensor] = rule(q, k, v, g=g, beta=beta, **options)
        return result
    q, k = normalize(q) * q.shape[-1] ** -0.5, normalize(k)
    columns = [x.double().transpose(1, 2) for x in (q, k, v, g, beta)]
    state, outputs = v.new_zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1]), []
    for i in range(v.shape[1]):
        y, state = run_token(HeadTokens(*(x[:, :, i : i + 1] for x in columns)), state)
        outputs.append(y)
    return torch.cat(outputs, 2).transpose(1, 2), state
