"""What runs a model on CUDA: Triton's kernels, and graphs of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from nanovllm.attention.base import AttentionBackend, GraphedAttention
from nanovllm.attention.triton import TritonAttention
from nanovllm.config import EngineConfig
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.cuda.ops import TritonOps
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.cuda.decode_graphs import GraphedSteps, graph_bytes
from nanovllm.worker.cuda.prefill_graphs import GraphedChunks, chunk_sizes
from nanovllm.worker.cuda.sampler import TritonSampler
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.runner import ModelRunner
from nanovllm.worker.tables import SlotTables


@dataclass(frozen=True, slots=True)
class CudaBackend:
    platform: CudaPlatform
    dtype: torch.dtype
    group: TPGroup
    ops: TritonOps
    attention: AttentionBackend
    config: EngineConfig
    vocab_size: int

    def __post_init__(self) -> None:
        attention = self._graphed_attention()
        if attention is not None:
            max_num_seqs = self.config.max_num_seqs
            sizes = chunk_sizes(self.max_tokens, max_num_seqs)
            share = sizes[-1].num_tokens / self.max_tokens
            # A group's logits exist three times while they are put side by side.
            num_rows = max_num_seqs * (1 if self.group.is_alone else 3)
            self.platform.reserve_for_graphs(
                graph_bytes(num_rows, self.vocab_size, self.dtype),
                step_share=share if isinstance(attention, TritonAttention) else 0.0,
            )

    @property
    def max_tokens(self) -> int:
        """Of a step."""
        config = self.config
        return min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)

    def sampler(self, tables: SlotTables) -> TritonSampler:
        return TritonSampler(tables, self.vocab_size, self.group)

    def runner(self, eager: EagerForward) -> ModelRunner:
        tables, platform = eager.tables, self.platform
        sampler = self.sampler(tables)
        attention, max_model_len = self._graphed_attention(), self.config.max_model_len
        if attention is None:
            return ModelRunner(eager, eager, sampler)
        chunks = None
        if isinstance(attention, TritonAttention):
            chunks = GraphedChunks(eager, attention, platform, self.max_tokens, max_model_len)
        graphed = GraphedSteps(eager, attention, sampler, platform, max_model_len, chunks)
        is_watched = sys.stderr is not None and sys.stderr.isatty()
        graphed.capture(show_progress=is_watched and self.group.rank == 0)
        step = eager.model.step
        check = None if step is None else step.check
        return ModelRunner(eager, graphed, graphed.sample, check)

    def _graphed_attention(self) -> GraphedAttention | None:
        """The attention, if its decode steps are to be graphs and can be."""
        if self.config.enforce_eager or not isinstance(self.attention, GraphedAttention):
            return None
        return self.attention
