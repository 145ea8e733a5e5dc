"""The vision tower, in transformers' model code: from the pixels of an image to embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.list_tensors import list_vision_tensors
from nanovllm.engine.images import PromptImage
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.vision.image_settings import TEXT_ANYWAY, ImageSettings
from nanovllm.worker.device_interface import Device


class Tower:
    """A loaded vision tower, which encodes one image at a time."""

    def __init__(self, model: Any, settings: ImageSettings, device: Device) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.dtype = next(model.parameters()).dtype
        channels = [torch.tensor(each) for each in (settings.mean, settings.std)]
        self._mean, self._std = (each.to(device.torch_device).view(3, 1, 1) for each in channels)

    def encode(self, image: PromptImage) -> Tensor:
        """Return the embeddings of an image, [tokens, hidden_size]."""
        from transformers import vision_utils

        model, merge = self.model, self.settings.merge_size
        # On the host: if this tensor were on the device, every layer would wait for it.
        grid = torch.tensor([[1, image.height * merge, image.width * merge]])
        position_ids = vision_utils.get_vision_position_ids(grid, merge)
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            model.num_grid_per_side,
            model.interpolation_mode,
            model.interpolation_align_corners,
            merge,
        )
        output: Tensor = model(
            self.patches(image),
            grid_thw=grid,
            position_ids=self.device.upload(position_ids.numpy()),
            interp_indices=self.device.upload(indices.numpy()),
            interp_weights=self.device.upload(weights.numpy()),
        ).pooler_output
        return output

    def patches(self, image: PromptImage) -> Tensor:
        """Normalize an image and split it into patches, as transformers does for Qwen2-VL.

        The patches of a token follow each other: [patches, channels * frames * size * size].
        """
        settings = self.settings
        size, merge, edge = settings.patch_size, settings.merge_size, settings.token_size
        array = np.frombuffer(bytearray(image.pixels), np.uint8)  # torch needs writable memory
        array = array.reshape(image.height * edge, image.width * edge, 3)
        pixels = self.device.upload(array).permute(2, 0, 1).float() / 255
        pixels = (pixels - self._mean) / self._std
        pixels = pixels.view(3, image.height, merge, size, image.width, merge, size)
        # [height, width, merge, merge, 3, size, size]
        patches = pixels.permute(1, 4, 2, 5, 0, 3, 6)
        patches = patches.unsqueeze(5).expand(*[-1] * 5, settings.frames, -1, -1)
        return patches.flatten(4).flatten(0, 3).to(self.dtype)


def load_tower(
    settings: ImageSettings, checkpoint: Checkpoint, device: Device, dtype: torch.dtype
) -> Tower:
    """Build the tower and load its weights; without weight files, they are random."""
    with torch.device(device.torch_device):
        model = _build(settings.vision_config, dtype)
    if checkpoint.weight_files:
        _load_weights(model, checkpoint, device)
    return Tower(model.eval(), settings, device)


def _build(vision_config: Any, dtype: torch.dtype) -> nn.Module:
    try:
        from transformers import vision_utils  # noqa: F401
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
    except ImportError as error:
        message = f"images need a newer transformers ({error}); update it, or {TEXT_ANYWAY}"
        raise UnsupportedModelError(message) from error
    config = Qwen3_5VisionConfig(**{**vision_config, "model_type": "qwen3_5_vision"})
    model: nn.Module = Qwen3_5VisionModel._from_config(config, dtype=dtype)
    return model


def _load_weights(model: nn.Module, checkpoint: Checkpoint, device: Device) -> None:
    expected = dict(model.named_parameters())
    stored = {tensor.name: tensor for tensor in list_vision_tensors(checkpoint)}
    shapes = {name: tuple(parameter.shape) for name, parameter in expected.items()}
    found = {name: tensor.shape for name, tensor in stored.items()}
    if wrong := sorted(dict(shapes.items() ^ found.items())):
        raise CheckpointError(
            f"{checkpoint.path}: the tensors of the vision tower do not fit its config "
            f"({', '.join(wrong[:3])}); fetch the model again, or {TEXT_ANYWAY}"
        )
    for name, parameter in expected.items():
        first = 0
        for rows in stored[name].read():
            device.fill(parameter.data[first : first + len(rows)], rows)
            first += len(rows)
