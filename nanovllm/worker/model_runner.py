"""StepPlan in, tokens out: the device side of one step."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend, LayerCache
from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import DecoderModel
from nanovllm.worker.input_buffers import InputBuffers


class ModelRunner:
    def __init__(
        self,
        model: DecoderModel,
        caches: list[LayerCache],
        attention: AttentionBackend,
        buffers: InputBuffers,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.caches = caches
        self.attention = attention
        self.buffers = buffers
        self.dtype = dtype

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self.buffers.update(plan)
        batch = self.buffers.batch(plan, self.attention, self.dtype, self.caches)
        logits = self.model(batch)
        if not len(logits):
            return StepResult(np.empty(0, np.int32))
        self.buffers.mask_stop_tokens(logits, plan)
        tokens = sample(logits, self.buffers.sampling_columns(plan)).to(torch.int32).numpy()
        self.buffers.append(plan, tokens)
        return StepResult(tokens)
