"""Sampling on CUDA without the host: kernels read the parameters by slot and advance the tables."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.distributed.group import TPGroup
from nanovllm.engine.step import StepPlan
from nanovllm.kernels.cuda.sampling import (
    SamplingTables,
    advance,
    sample_tokens,
    sampling_workspace,
)
from nanovllm.kernels.ops import SamplingVariant
from nanovllm.worker.forward import StepLogits
from nanovllm.worker.input_buffers import InputBuffers


class TritonSampler:
    def __init__(self, buffers: InputBuffers, vocab_size: int, group: TPGroup) -> None:
        self.buffers = buffers
        self.group = group
        self._tables = SamplingTables(
            buffers.temperature, buffers.top_k, buffers.top_p, buffers.min_p, buffers.seed
        )
        self._workspace = sampling_workspace(buffers.num_slots, vocab_size, buffers.platform.device)

    def __call__(self, logits: StepLogits, plan: StepPlan) -> Tensor:
        return self.sample(logits, self.buffers.sampling_variant(plan))

    def sample(self, logits: StepLogits, variant: SamplingVariant) -> Tensor:
        out = torch.empty(len(logits.values), dtype=torch.int32, device=logits.values.device)
        if self.group.rank == 0:
            sample_tokens(
                logits.values,
                logits.slots,
                self._tables,
                logits.positions,
                variant,
                out,
                self._workspace,
            )
        self.group.broadcast(out)
        advance(out, logits.slots, self.buffers.tokens, self.buffers.lengths)
        return out
