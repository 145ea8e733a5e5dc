"""What runs a model on CUDA: Triton's kernels, and graphs of them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.attention.base import AttentionBackend, GraphedAttention
from nanovllm.attention.triton import TritonAttention
from nanovllm.backends.cuda.decode_graphs import GraphedSteps, graph_bytes
from nanovllm.backends.cuda.prefill_graphs import (
    ChunkSize,
    GraphedChunks,
    chunk_sizes,
    count_many_tokens,
)
from nanovllm.backends.cuda.sampler import TritonSampler
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.devices.cuda.persistent import build
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.cuda.compile_ahead import compile_ahead, is_first_use, stamp_path
from nanovllm.kernels.cuda.logprobs import token_logprobs
from nanovllm.kernels.cuda.masks import keep_allowed
from nanovllm.kernels.cuda.ops import TritonOps
from nanovllm.kernels.kv_layout import KVCacheSpec
from nanovllm.models.decoder import DecoderBody, DecoderModel
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.runner import ModelRunner
from nanovllm.worker.tables import SlotTables

if TYPE_CHECKING:
    from nanovllm.devices.cuda.persistent.step import PersistentStep

logger = logging.getLogger(__name__)

KERNEL_OPTIONS = (  # which kernels there are depends on
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kvcache_block_size",
    "attention_backend",
    "enforce_eager",
    "model",  # whose weights may be quantised
    "quantization",
    "kv_cache_dtype",
)
MIN_PROCESSES, MAX_PROCESSES = 4, 12  # that compile; each takes a while to import what it needs


@dataclass(eq=False)
class CudaBackend:
    platform: CudaPlatform
    dtype: torch.dtype
    group: TPGroup
    ops: TritonOps
    attention: AttentionBackend
    config: EngineConfig
    model_config: ModelConfig
    persistent: PersistentStep | None = None  # once a model is loaded

    def __post_init__(self) -> None:
        attention = self._graphed_attention()
        if attention is not None:
            max_num_seqs = self.config.max_num_seqs
            share = self.prefill_sizes[-1].num_tokens / self.max_tokens
            # A group's logits exist three times while they are put side by side.
            num_rows = max_num_seqs * (1 if self.group.is_alone else 3)
            self.platform.reserve_for_graphs(
                graph_bytes(num_rows, self.model_config.vocab_size, self.dtype),
                step_share=share if isinstance(attention, TritonAttention) else 0.0,
            )

    @property
    def max_tokens(self) -> int:
        """Of a step."""
        config = self.config
        return min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)

    @property
    def prefill_sizes(self) -> list[ChunkSize]:
        """Of steps with prompts that are graphs."""
        most = count_many_tokens(self.model_config)
        return chunk_sizes(self.max_tokens, self.config.max_num_seqs, most)

    def sampler(self, tables: SlotTables) -> TritonSampler:
        return TritonSampler(tables, self.model_config.vocab_size, self.group)

    def prepare(
        self, model: DecoderModel, cache: KVCacheSpec, largest_step: Callable[[], EagerForward]
    ) -> None:
        if self._graphed_attention() is not None:
            self.persistent = build(model, cache)
        self.compile_ahead(largest_step)

    def compile_ahead(self, largest_step: Callable[[], EagerForward]) -> None:
        """With fewer cores, or in a group, whose ranks would compile the same, it does not pay."""
        num_processes = min(MAX_PROCESSES, os.cpu_count() or 1)
        if num_processes < MIN_PROCESSES or not self.group.is_alone or not is_first_use():
            return
        sizes = [getattr(self.config, name) for name in KERNEL_OPTIONS]
        stamp = stamp_path(sizes, self.model_config, self.platform.device_name, self.dtype)
        if stamp.exists():
            return
        logger.warning("Compiling the CUDA kernels: 10 to 30 seconds, once on this machine")
        compile_ahead(lambda: self._every_step(largest_step()), num_processes)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()

    def runner(self, eager: EagerForward) -> ModelRunner:
        sampler, attention = self.sampler(eager.tables), self._graphed_attention()
        if attention is None:
            return ModelRunner(eager, eager, sampler, score=token_logprobs, mask=keep_allowed)
        graphed = self._graphed_steps(eager, attention, sampler)
        if self.config.is_for_streams:
            self.capture_all(graphed)
        else:
            graphed.capture_first()
        return ModelRunner(
            eager,
            graphed,
            graphed.sample,
            check=graphed.has_lost_step,
            note=graphed.note,
            score=token_logprobs,
            mask=keep_allowed,
            replay_masked=graphed.replay_masked,
            capture_one=graphed.capture_one,
        )

    def capture_all(self, graphed: GraphedSteps) -> None:
        """Compile and load every kernel and capture the graphs, so that no request waits for it."""
        logger.info("Capturing CUDA graphs, so that no request waits for one")
        begin = time.perf_counter()
        with one_of_each_layer(graphed.eager.model.model, self.model_config):
            graphed.run_every_size()
        loaded = time.perf_counter()
        graphed.capture_all()
        seconds = time.perf_counter() - loaded
        logger.info("Kernels took %.1f s, CUDA graphs %.1f s", loaded - begin, seconds)

    def _every_step(self, eager: EagerForward) -> None:
        if (attention := self._graphed_attention()) is None:
            return
        steps = self._graphed_steps(eager, attention, self.sampler(eager.tables))
        with one_of_each_layer(eager.model.model, self.model_config):
            steps.run_every_size()

    def _graphed_steps(
        self, eager: EagerForward, attention: GraphedAttention, sampler: TritonSampler
    ) -> GraphedSteps:
        platform, chunks = self.platform, None
        if isinstance(attention, TritonAttention):
            chunks = GraphedChunks(eager, attention, platform, self.prefill_sizes)
        captures_ahead = self.config.is_for_streams
        return GraphedSteps(
            eager, attention, sampler, platform, chunks, captures_ahead, self.persistent
        )

    def _graphed_attention(self) -> GraphedAttention | None:
        """The attention, if its decode steps are to be graphs and can be."""
        if self.config.enforce_eager or not isinstance(self.attention, GraphedAttention):
            return None
        return self.attention


@contextmanager
def one_of_each_layer(body: DecoderBody, config: ModelConfig) -> Iterator[None]:
    """Let a model run its last layer and one of each kind: the others launch the same kernels."""
    layers, ropes = body.layers, body.ropes
    kinds = [
        (config.layers[i], _kind_of(layer), i + 1 == config.num_layers)
        for i, layer in enumerate(layers)
    ]
    chosen = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    body.layers = nn.ModuleList(layers[i] for i in chosen)
    body.ropes = [ropes[i] for i in chosen]
    try:
        yield
    finally:
        body.layers, body.ropes = layers, ropes


def _kind_of(layer: nn.Module) -> object:
    """What a layer consists of, and how its weights are packed: some may stay quantised."""
    packed = [getattr(module, "packed", None) for module in layer.modules()]
    return repr(layer), [_described(each) for each in packed]


def _described(value: object) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    if is_dataclass(value):
        return type(value), [_described(getattr(value, each.name)) for each in fields(value)]
    return type(value)
