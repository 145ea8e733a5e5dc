"""Sampling on CUDA without host work: kernels read and update the InputBatch directly."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.devices.cuda.kernels.sampling import advance, sample_tokens, sampling_workspace
from nanovllm.engine.step import StepPlan
from nanovllm.ops.interface import Sampling
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker.forward import Sampled, StepLogits
from nanovllm.worker.input_batch import InputBatch


class TritonSampler:
    def __init__(self, input_batch: InputBatch, vocab_size: int, group: TPGroup) -> None:
        self.input_batch = input_batch
        self.group = group
        device = input_batch.device.torch_device
        self._workspace = sampling_workspace(input_batch.num_slots, vocab_size, device)

    def __call__(self, logits: StepLogits, plan: StepPlan) -> Sampled:
        return Sampled(self.sample(logits, self.input_batch.sampling(plan)))

    def sample(
        self,
        logits: StepLogits,
        asked: Sampling,
        out: Tensor | None = None,
        host: Tensor | None = None,
    ) -> Tensor:
        """Sample one token per row, into `out` if given, and append it to the row's slot.

        `asked` must include all features that the rows use. `host`, if given, is pinned memory that
        receives a copy of the tokens, but only without tensor parallelism.
        """
        if out is None:
            out = torch.empty(len(logits.values), dtype=torch.int32, device=logits.values.device)
        state = self.input_batch.tokens, self.input_batch.lengths
        if self.group.rank == 0:
            sample_tokens(
                logits.values,
                logits.slots,
                self.input_batch.sampling_columns,
                logits.positions,
                asked,
                out,
                self._workspace,
                *((*state, host) if self.group.is_alone else ()),
            )
        if not self.group.is_alone:
            self.group.broadcast(out)
            advance(out, logits.slots, logits.positions, *state)
        return out
