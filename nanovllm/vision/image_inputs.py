"""ImageInputs: what images add to a worker. Embeds their tokens, and rotates queries and keys.

An image is encoded when the first chunk that contains some of its tokens runs. So it waits its turn
as its prompt does, and a step encodes at most one image more than fits in its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.checkpoint.find import stores_quantized
from nanovllm.engine.images import PromptImage
from nanovllm.engine.step import Pending, StepPlan
from nanovllm.layers.build import EmbeddedTokens, ForwardBatch
from nanovllm.models.decoder import DecoderModel
from nanovllm.vision.image_settings import ImageSettings
from nanovllm.vision.tower import Tower, load_tower
from nanovllm.worker.device_interface import Device
from nanovllm.worker.forward import StepLogits, slots_and_positions
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.memory_needs import MemoryNeeds
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.worker import Worker

CACHE_BYTES = 1 << 30  # host memory for embeddings, shared by the ranks


@dataclass(frozen=True, slots=True)
class Prompt:
    """The images of the sequence in a slot."""

    images: tuple[PromptImage, ...]
    axes: npt.NDArray[np.int64]  # [3, tokens], up to the end of the last image: see `axes_of`
    offset: int  # of the position of later tokens on all three axes

    @property
    def end(self) -> int:
        return self.axes.shape[1]


class ImageInputs:
    """Follows which slots have images, and edits the batches of steps that run them."""

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self._prompts: dict[int, Prompt] = {}  # keyed by slot
        self._has_images = False  # whether a row of the step starts before the end of an image

    def load(self, worker: Worker) -> MemoryNeeds:
        config, checkpoint, device = worker.config, worker.checkpoint, worker.device
        is_quantized = stores_quantized(checkpoint.config)
        dtype = device.choose_dtype(config.dtype, worker.model_config.dtype, is_quantized)
        self._max_len = config.max_model_len
        self.tower = load_tower(self.settings, checkpoint, device, dtype)
        self.cache = EmbeddingCache(self.tower, CACHE_BYTES // device.group.size)
        return MemoryNeeds(weights=0, tables=0, states=0, block=0, step=0, graphs=0)

    def profile(self) -> None:
        """Encode the largest image that a prompt can have."""
        settings = self.settings
        num_tokens = min(settings.max_pixels // settings.token_size**2, self._max_len)
        side = int(num_tokens**0.5)
        pixels = bytes(3 * (side * settings.token_size) ** 2)
        self.tower.encode(PromptImage(0, settings.placeholder_id, side, side, pixels))

    def attach(self, runner: ModelRunner, num_blocks: int, input_batch: InputBatch) -> None:
        self._runner, self._replay, self._eager = runner, runner.forward, runner.eager
        model = runner.eager.model
        assert isinstance(model, DecoderModel)
        rope = model.config.layers[0].rope
        pairs = (rope.rotary_dim or model.config.head_dim) // 2
        self._device = input_batch.device
        axes = np.zeros(model.config.head_dim // 2, np.int64)
        axes[:pairs] = axis_of_pairs(pairs, self.settings.mrope_section)
        self._axis_of_pair = self._device.upload(axes)
        self._table = model.model.ropes[0].transpose(1, 2)  # [positions, pairs, 2]
        runner.stages.append(self.track)
        runner.eager.edits.append(self.edit)
        runner.forward = self.forward

    def track(self, plan: StepPlan) -> StepPlan:
        for slot in plan.released:
            self._prompts.pop(slot, None)
        for row in plan.new_rows:
            if row.images:
                axes, offset = axes_of(row.images)
                self._prompts[row.slot] = Prompt(row.images, axes, offset)
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), strict=True) if self._prompts else ()
        ends = ((self._prompts.get(slot), start) for slot, start in rows)
        self._has_images = any(prompt and start < prompt.end for prompt, start in ends)
        return plan

    def forward(self, plan: StepPlan) -> StepLogits:
        """Run the model; captured steps read the embeddings of tokens, so images run without."""
        if not self._has_images:
            return self._replay(plan)
        if self._runner.steps is not None:
            self._runner.steps.note(plan)  # a replayed step would record new sequences itself
        return self._eager(plan)

    def edit(self, plan: StepPlan, batch: ForwardBatch) -> ForwardBatch:
        """Set the positions of rows whose prompts have images, and the embeddings of images."""
        if self._prompts.keys().isdisjoint(plan.slots.tolist()):
            return batch
        positions = np.tile(slots_and_positions(plan)[1], (3, 1))
        index: list[npt.NDArray[np.int64]] = []
        values: list[Tensor] = []
        columns = plan.slots, plan.starts, plan.counts, np.cumsum(plan.counts) - plan.counts
        for slot, start, count, first in zip(*(each.tolist() for each in columns), strict=True):
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            axes = prompt.axes[:, start : start + count]
            positions[:, first : first + axes.shape[1]] = axes
            positions[:, first + axes.shape[1] : first + count] += prompt.offset
            for image in prompt.images:
                begin, end = max(image.start, start), min(image.end, start + count)
                if begin < end:
                    index.append(np.arange(begin, end) + first - start)
                    values.append(self.cache.get(image, begin - image.start, end - image.start))
        if not self._has_images:
            return replace(batch, positions=self._device.upload(positions[0]))
        embedded = None
        if values:
            index_of = self._device.upload(np.concatenate(index))
            embedded = EmbeddedTokens(index_of, torch.cat(values))
        return replace(
            batch,
            input_ids=batch.input_ids.clamp(min=0),
            positions=torch.arange(positions.shape[1], device=self._device.torch_device),
            rope=self._rotations(self._device.upload(positions)),
            embedded=embedded,
        )

    def _rotations(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines [tokens, 2, pairs] of positions [3, tokens]."""
        pairs = torch.arange(len(self._axis_of_pair), device=positions.device)
        rows = self._table[positions[self._axis_of_pair].T, pairs]  # [tokens, pairs, 2]
        return rows.transpose(1, 2).contiguous()


class EmbeddingCache:
    """The embeddings of the images used last, in host memory."""

    def __init__(self, tower: Tower, max_bytes: int) -> None:
        self._tower, self.max_bytes = tower, max_bytes
        self._device: Device = tower.device
        self._num_bytes = 0
        self.num_encoded = 0
        # Keyed by token_id, which stands for one exact image.
        self._entries: OrderedDict[int, tuple[Pending[list[np.ndarray]], int]] = OrderedDict()

    def get(self, image: PromptImage, first: int, end: int) -> Tensor:
        """Return the embeddings of some tokens of an image, [tokens, hidden_size].

        The image is encoded if necessary.
        """
        if image.token_id in self._entries:
            self._entries.move_to_end(image.token_id)
            [words] = self._entries[image.token_id][0].result()
            return self._device.upload(words[first:end]).view(self._tower.dtype)
        embeddings = self._tower.encode(image)
        self.num_encoded += 1
        # numpy has no bfloat16.
        entry = self._device.fetch(embeddings.view(torch.int16)), embeddings.nbytes
        self._entries[image.token_id] = entry
        self._num_bytes += embeddings.nbytes
        while self._num_bytes > self.max_bytes and len(self._entries) > 1:
            self._num_bytes -= self._entries.popitem(last=False)[1][1]
        return embeddings[first:end]


def axes_of(images: Sequence[PromptImage]) -> tuple[npt.NDArray[np.int64], int]:
    """Return the positions [3, tokens] on the axes time, height and width, as in M-RoPE.

    They end with the last image. For text, all three are equal. The tokens of an image have the
    time of its beginning, and its height and width begin there. The text after it begins behind the
    longer side of the image. Also return the offset of that text.
    """
    axes = np.tile(np.arange(images[-1].end), (3, 1))
    offset = 0
    for image in images:
        axes[:, image.end :] += image.rope_offset
        first = image.start + offset
        y, x = np.divmod(np.arange(image.num_tokens), image.width)
        axes[:, image.start : image.end] = first + np.stack((0 * y, y, x))
        offset += image.rope_offset
    return axes, offset


def axis_of_pairs(num_pairs: int, section: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """Return the axis that turns each pair of dimensions: they alternate, as in Qwen3-VL."""
    pairs = np.arange(num_pairs)
    axes = pairs % 3
    sizes = 3 * np.array([num_pairs, section[1], section[2]])
    axes[pairs >= sizes[axes]] = 0
    return axes
