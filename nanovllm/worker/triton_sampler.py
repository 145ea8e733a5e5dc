"""Sampling on CUDA without the host: kernels read the parameters by slot and advance the tables."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.engine.step import StepPlan
from nanovllm.kernels.sampling import (
    SamplingTables,
    SamplingWorkspace,
    advance,
    sample_tokens,
    sampling_workspace,
)
from nanovllm.worker.forward import StepLogits
from nanovllm.worker.input_buffers import InputBuffers


class TritonSampler:
    def __init__(self, buffers: InputBuffers) -> None:
        self.buffers = buffers
        self.tables = SamplingTables(
            buffers.temperature, buffers.top_k, buffers.top_p, buffers.min_p, buffers.seed
        )
        self._workspace: SamplingWorkspace | None = None

    def __call__(self, logits: StepLogits, plan: StepPlan) -> Tensor:
        num_rows, vocab_size = logits.values.shape
        device = logits.values.device
        if self._workspace is None:
            self._workspace = sampling_workspace(self.buffers.num_slots, vocab_size, device)
        out = torch.empty(num_rows, dtype=torch.int32, device=device)
        if not num_rows:
            return out
        variant = self.buffers.sampling_variant(plan)
        sample_tokens(
            logits.values,
            logits.slots,
            self.tables,
            logits.positions,
            variant,
            out,
            self._workspace,
        )
        advance(out, logits.slots, self.buffers.tokens, self.buffers.lengths)
        return out
