"""What runs a model on CUDA: Triton's kernels, and graphs of them."""

from __future__ import annotations

import sys

import torch

from nanovllm.attention import create_attention
from nanovllm.attention.base import GraphedAttention
from nanovllm.attention.triton import TritonAttention
from nanovllm.config import EngineConfig
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.cuda.ops import TritonOps
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.cuda.decode_graphs import GraphedSteps, graph_bytes
from nanovllm.worker.cuda.prefill_graphs import GraphedChunks, chunk_sizes
from nanovllm.worker.cuda.sampler import TritonSampler
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.input_buffers import InputBuffers
from nanovllm.worker.runner import ModelRunner


class CudaBackend:
    def __init__(
        self,
        platform: CudaPlatform,
        config: EngineConfig,
        vocab_size: int,
        dtype: torch.dtype,
        group: TPGroup,
    ) -> None:
        self.platform = platform
        self.config = config
        self.vocab_size = vocab_size
        self.group = group
        self.ops = TritonOps()
        self.attention = create_attention(
            platform, self.ops, config.kvcache_block_size, config.attention_backend, dtype
        )
        self.max_tokens = min(
            config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len
        )
        attention = self._graphed_attention()
        if attention is not None:
            sizes = chunk_sizes(self.max_tokens, config.max_num_seqs)
            share = sizes[-1].num_tokens / self.max_tokens
            # A group's logits exist three times while they are put side by side.
            num_lines = config.max_num_seqs * (1 if group.is_alone else 3)
            platform.reserve_for_graphs(
                graph_bytes(num_lines, vocab_size, dtype),
                step_share=share if isinstance(attention, TritonAttention) else 0.0,
            )

    def sampler(self, buffers: InputBuffers) -> TritonSampler:
        return TritonSampler(buffers, self.vocab_size, self.group)

    def runner(self, eager: EagerForward) -> ModelRunner:
        sampler, attention = self.sampler(eager.buffers), self._graphed_attention()
        if attention is None:
            return ModelRunner(eager.buffers, eager, sampler)
        config, platform, chunks = self.config, self.platform, None
        if isinstance(attention, TritonAttention):
            chunks = GraphedChunks(
                eager, attention, platform, self.max_tokens, config.max_model_len
            )
        graphed = GraphedSteps(eager, attention, sampler, platform, config.max_model_len, chunks)
        is_watched = sys.stderr is not None and sys.stderr.isatty()
        graphed.capture(show_progress=is_watched and self.group.rank == 0)
        step = eager.model.step
        check = None if step is None else step.check
        return ModelRunner(eager.buffers, graphed, graphed.sample, check)

    def _graphed_attention(self) -> GraphedAttention | None:
        """The attention, if its decode steps are to be graphs and can be."""
        if self.config.enforce_eager or not isinstance(self.attention, GraphedAttention):
            return None
        return self.attention
