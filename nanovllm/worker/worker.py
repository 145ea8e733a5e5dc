"""A worker: builds platform, model and cache for one device, then serves plans."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn

from nanovllm.attention import create_attention
from nanovllm.attention.base import AttentionBackend
from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import ExecutorInfo, StepPlan
from nanovllm.kernels import create_ops
from nanovllm.layers.build import Build
from nanovllm.layers.linear import MergedLinear
from nanovllm.models.decoder import DecoderModel
from nanovllm.models.registry import build_model
from nanovllm.platforms import create_platform
from nanovllm.platforms.base import Platform
from nanovllm.worker.forward import EagerForward, Forward
from nanovllm.worker.input_buffers import InputBuffers
from nanovllm.worker.kv_cache import KVCacheSpec, choose_num_blocks, kv_cache_spec
from nanovllm.worker.loader import fill_dummy_weights, load_weights
from nanovllm.worker.model_runner import ModelRunner, PendingStep, Sampler
from nanovllm.worker.samplers import TorchSampler


class Worker:
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.checkpoint = checkpoint

    @torch.inference_mode()
    def start(self) -> ExecutorInfo:
        config = self.config
        platform = create_platform(config.device, config.gpu_memory_utilization)
        dtype = _choose_dtype(config.dtype, self.model_config.dtype, platform)
        ops = create_ops(platform, dtype)
        attention = create_attention(platform, ops, config.kvcache_block_size)
        build = Build(platform.device, dtype, attention, ops)
        model = build_model(self.model_config, config.max_model_len, build)
        if config.load_format == "dummy":
            fill_dummy_weights(model, config.seed)
        else:
            load_weights(model, self.checkpoint)
        pack_linears(model, platform)

        spec = kv_cache_spec(config, self.model_config, dtype)
        platform.profile(lambda: self._largest_step(platform, model, attention, spec))
        num_blocks = choose_num_blocks(config, spec, platform)
        caches = spec.views(platform.allocate_cache(num_blocks * spec.block_bytes), num_blocks)
        buffers = self._buffers(platform)
        eager = EagerForward(model, buffers, attention, caches, dtype)
        forward = self._forward(platform, eager, build)
        self.runner = ModelRunner(platform, buffers, forward, _sampler(platform, buffers))
        return ExecutorInfo(num_blocks, platform.depth, platform.name, str(dtype).split(".")[-1])

    def run(self, plan: StepPlan) -> PendingStep:
        return self.runner.run(plan)

    def _buffers(self, platform: Platform) -> InputBuffers:
        config = self.config
        return InputBuffers(
            platform, config.max_num_seqs, config.max_model_len, config.kvcache_block_size
        )

    def _forward(self, platform: Platform, eager: EagerForward, build: Build) -> Forward:
        """Recorded steps where the device gains by them."""
        config = self.config
        if config.enforce_eager:
            return eager
        if platform.name == "cuda":
            from nanovllm.platforms.cuda import CudaPlatform
            from nanovllm.worker.graphed_forward import GraphedForward

            assert isinstance(platform, CudaPlatform)
            graphed = GraphedForward(eager, platform, config.max_model_len)
            graphed.capture(show_progress=sys.stderr.isatty())
            return graphed
        if build.ops.launcher is not None:
            from nanovllm.worker.recorded_forward import RecordedForward

            return RecordedForward(eager, build.ops.launcher, config.max_model_len)
        return eager

    def _largest_step(
        self,
        platform: Platform,
        model: DecoderModel,
        attention: AttentionBackend,
        spec: KVCacheSpec,
    ) -> None:
        """Run as many tokens, and sample as many rows, as a step may have; they share blocks."""
        config = self.config
        num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        row_len = min(-(-config.max_num_batched_tokens // num_rows), config.max_model_len)
        num_blocks = -(-row_len // spec.block_size)
        cache = platform.allocate_cache(num_blocks * spec.block_bytes)
        buffers = self._buffers(platform)
        buffers.block_table[:, :num_blocks] = torch.arange(num_blocks, device=platform.device)
        column = np.ones(num_rows, np.int32)
        plan = StepPlan(
            slots=np.arange(num_rows, dtype=np.int32),
            starts=0 * column,
            counts=row_len * column,
            num_logits=column,
            new_rows=[],
            block_updates=[],
            released=[],
            num_decode_tokens=0,
        )
        eager = EagerForward(model, buffers, attention, spec.views(cache, num_blocks), spec.dtype)
        _sampler(platform, buffers)(eager(plan), plan)


def pack_linears(model: nn.Module, platform: Platform) -> None:
    """Lay out every weight as the device multiplies it fastest."""
    linears = [module for module in model.modules() if isinstance(module, MergedLinear)]
    num_bytes = sum(linear.weight.nbytes for linear in linears)
    has_room = platform.has_room_for_copy(num_bytes)
    for linear in linears:
        linear.pack(has_room)


def _sampler(platform: Platform, buffers: InputBuffers) -> Sampler:
    if platform.name == "cuda":
        from nanovllm.worker.triton_sampler import TritonSampler

        return TritonSampler(buffers)
    return TorchSampler(buffers)


def _choose_dtype(asked: str, checkpoint_dtype: str, platform: Platform) -> torch.dtype:
    if asked == "auto":
        return platform.choose_dtype(checkpoint_dtype)
    dtype: torch.dtype = getattr(torch, asked)
    return dtype
