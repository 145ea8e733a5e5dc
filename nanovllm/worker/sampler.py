"""Sample tokens and write them to the InputBatch, where the next step reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.engine.step import StepPlan
from nanovllm.ops import torch_sampling
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker.forward import Sampled, StepLogits
from nanovllm.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class TorchSampler:
    input_batch: InputBatch
    group: TPGroup

    def __call__(self, logits: StepLogits, plan: StepPlan) -> Sampled:
        input_batch = self.input_batch
        slots, positions = logits.slots.long(), logits.positions.long()
        if not len(slots):
            return Sampled(slots.int())
        tokens = torch.empty_like(slots, dtype=torch.int32)
        if self.group.rank == 0:
            columns = input_batch.sampling_columns.select(slots)
            tokens.copy_(torch_sampling.sample(logits.values, columns, positions))
        self.group.broadcast(tokens)
        input_batch.tokens[slots, positions] = tokens.clamp(min=0)  # NO_TOKEN has no embedding
        input_batch.lengths[slots] = logits.positions + 1
        return Sampled(tokens)
