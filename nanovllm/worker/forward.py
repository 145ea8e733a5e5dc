"""From a plan to logits, by running the model as it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, LayerCache
from nanovllm.engine.step import StepPlan
from nanovllm.models.decoder import DecoderModel
from nanovllm.worker.input_buffers import InputBuffers, sampled_rows


@dataclass(frozen=True, slots=True)
class StepLogits:
    """One line per sampled row, in row order."""

    values: Tensor  # [rows, vocab_size]
    slots: Tensor
    positions: Tensor  # of the token that will be sampled
    graph_size: int | None = None  # the rows, with padding, of the CUDA graph that wrote them


Forward = Callable[[StepPlan], StepLogits]


@dataclass(frozen=True, slots=True)
class EagerForward:
    model: DecoderModel
    buffers: InputBuffers
    attention: AttentionBackend
    caches: list[LayerCache]
    dtype: torch.dtype

    def __call__(self, plan: StepPlan) -> StepLogits:
        batch = self.buffers.batch(plan, self.attention, self.dtype, self.caches)
        return self.step_logits(self.model(batch), plan)

    def step_logits(self, values: Tensor, plan: StepPlan) -> StepLogits:
        slots, positions = map(self.buffers.platform.upload, sampled_rows(plan))
        return StepLogits(values, slots, positions)
