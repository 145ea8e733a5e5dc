"""StepPlan in, tokens out: the device side of one step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, LayerCache
from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.layers.build import ForwardBatch
from nanovllm.layers.sampler import sample
from nanovllm.worker.input_buffers import InputBuffers

Forward = Callable[[ForwardBatch], Tensor]


class ModelRunner:
    def __init__(
        self,
        forward: Forward,
        caches: list[LayerCache],
        attention: AttentionBackend,
        buffers: InputBuffers,
        dtype: torch.dtype,
    ) -> None:
        self.forward = forward
        self.caches = caches
        self.attention = attention
        self.buffers = buffers
        self.dtype = dtype

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self.buffers.update(plan)
        batch = self.buffers.batch(plan, self.attention, self.dtype, self.caches)
        logits = self.forward(batch)
        if not len(logits):
            return StepResult(np.empty(0, np.int32))
        self.buffers.mask_stop_tokens(logits, plan)
        tokens = sample(logits, self.buffers.sampling_columns(plan)).to(torch.int32).numpy()
        self.buffers.append(plan, tokens)
        return StepResult(tokens)
