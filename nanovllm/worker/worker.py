"""A worker: builds platform, model and cache for one device, then serves plans."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention import create_attention
from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import ExecutorInfo, StepPlan, StepResult
from nanovllm.kernels import create_ops
from nanovllm.kernels.base import Ops
from nanovllm.layers.build import Build
from nanovllm.layers.linear import MergedLinear
from nanovllm.models.decoder import DecoderModel
from nanovllm.models.registry import build_model
from nanovllm.platforms import create_platform
from nanovllm.platforms.base import Platform
from nanovllm.worker.input_buffers import InputBuffers
from nanovllm.worker.kv_cache import choose_num_blocks, kv_cache_spec
from nanovllm.worker.loader import fill_dummy_weights, load_weights
from nanovllm.worker.model_runner import Forward, ModelRunner


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
        platform = create_platform(config.device)
        dtype = _choose_dtype(config.dtype, self.model_config.dtype, platform)
        ops = create_ops(platform, dtype)
        attention = create_attention(ops, config.kvcache_block_size)
        build = Build(platform.device, dtype, attention, ops)
        model = build_model(self.model_config, config.max_model_len, build)
        if config.load_format == "dummy":
            fill_dummy_weights(model, config.seed)
        else:
            load_weights(model, self.checkpoint)
        pack_linears(model, platform)

        spec = kv_cache_spec(config, self.model_config, dtype)
        num_blocks = choose_num_blocks(config, spec, platform)
        caches = spec.views(platform.allocate_cache(num_blocks * spec.block_bytes), num_blocks)
        buffers = InputBuffers(config.max_num_seqs, config.max_model_len, config.kvcache_block_size)
        forward = _choose_forward(model, ops, config)
        self.runner = ModelRunner(forward, caches, attention, buffers, dtype)
        return ExecutorInfo(num_blocks, platform.depth, platform.name, str(dtype).split(".")[-1])

    def run(self, plan: StepPlan) -> StepResult:
        return self.runner.run(plan)


def pack_linears(model: nn.Module, platform: Platform) -> None:
    """Lay out every weight as the device multiplies it fastest."""
    linears = [module for module in model.modules() if isinstance(module, MergedLinear)]
    num_bytes = sum(linear.weight.nbytes for linear in linears)
    has_room = platform.has_room_for_copy(num_bytes)
    for linear in linears:
        linear.pack(has_room)


def _choose_forward(model: DecoderModel, ops: Ops, config: EngineConfig) -> Forward:
    if ops.launcher is None or config.enforce_eager:
        return model
    from nanovllm.worker.recorded_forward import RecordedForward  # needs numba, which may be absent

    return RecordedForward(model, ops.launcher, config.max_model_len)


def _choose_dtype(asked: str, checkpoint_dtype: str, platform: Platform) -> torch.dtype:
    if asked == "auto":
        return platform.choose_dtype(checkpoint_dtype)
    dtype: torch.dtype = getattr(torch, asked)
    return dtype
