"""From logits to tokens, which enter the tables where the next step reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.distributed.group import TPGroup
from nanovllm.engine.step import StepPlan
from nanovllm.layers.sampler import SamplingColumns, sample
from nanovllm.worker.forward import StepLogits
from nanovllm.worker.input_buffers import InputBuffers


@dataclass(frozen=True, slots=True)
class TorchSampler:
    buffers: InputBuffers
    group: TPGroup

    def __call__(self, logits: StepLogits, plan: StepPlan) -> Tensor:
        tables, slots, positions = self.buffers, logits.slots.long(), logits.positions.long()
        if not len(slots):
            return slots.int()
        if self.group.rank == 0:
            tokens = self._draw(logits.values, slots, positions)
        else:
            tokens = torch.empty_like(slots, dtype=torch.int32)
        self.group.broadcast(tokens)
        tables.tokens[slots, positions] = tokens.clamp(min=0)  # NO_TOKEN has no embedding
        tables.lengths[slots] = logits.positions + 1
        return tokens

    def _draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        tables = self.buffers
        columns = SamplingColumns(
            temperature=tables.temperature[slots],
            top_k=tables.top_k[slots].long(),
            top_p=tables.top_p[slots],
            min_p=tables.min_p[slots],
            seed=tables.seed[slots],
            position=positions,
        )
        return sample(logits, columns).to(torch.int32)
