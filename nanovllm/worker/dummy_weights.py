"""Random weights, for benchmarking a model without its checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanovllm.layers.shards import ExpectedTensor
from nanovllm.ops.quantized_weight import QuantizedRows
from nanovllm.worker.device_interface import Device
from nanovllm.worker.loader import LoadingLayers


def fill_dummy_weights(model: nn.Module, device: Device, seed: int) -> None:
    """Fill matrices with small random numbers, and vectors (such as norms) with ones."""
    layers = LoadingLayers(model, device)
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    for name in list(layers.expected):
        _fill_randomly(layers.expected[name], generator, device)
        layers.loaded(name)
    layers.process_rest()


def _fill_randomly(expected: ExpectedTensor, generator: torch.Generator, device: Device) -> None:
    target = expected.parts[0].target
    if isinstance(target, QuantizedRows):
        whole = torch.empty(expected.shape, device=device.torch_device)
        whole.normal_(generator=generator)
        for part in expected.parts:
            assert isinstance(part.target, QuantizedRows)
            part.target.put_random(whole[part.source])
        return
    # Generate the unsharded tensor, so that weights do not depend on the number of ranks.
    tensor = target if target.shape == expected.shape else target.new_empty(expected.shape)
    if tensor.dim() == 1:
        tensor.fill_(1.0)
    else:
        tensor.normal_(0.0, 0.02, generator=generator)
    if tensor is not target:
        for part in expected.parts:
            assert isinstance(part.target, Tensor)
            part.target.copy_(tensor[part.source])
