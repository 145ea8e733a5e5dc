"""The CPU device: chooses the dtype, compiled or torch kernels, and captured or eager steps."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.contention import ThreadChooser
from nanovllm.devices.cpu.features import CpuFeatures, find_cpu_features
from nanovllm.models.decoder import DecoderModel
from nanovllm.ops.interface import Ops
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.ops.tp_group import ALONE, TPGroup
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.torch_device import TorchDevice

logger = logging.getLogger(__name__)


class CpuDevice(TorchDevice):
    """A CPU with kernels compiled by numba; without numba or for float16, it uses torch."""

    def __init__(
        self, config: EngineConfig, group: TPGroup = ALONE, features: CpuFeatures | None = None
    ) -> None:
        super().__init__(config, group)
        self.features = features or find_cpu_features()
        self.chooser = ThreadChooser(torch.get_num_threads())

    def for_draft_model(self, config: EngineConfig) -> CpuDevice:
        device = CpuDevice(config, self.group, self.features)
        device.chooser = self.chooser
        return device

    def in_order(self, num_tokens: int = 0) -> AbstractContextManager[object]:
        # Ranks wait for each other, which looks as if their threads had no cores.
        return self.chooser.limit(num_tokens) if self.group.is_alone else nullcontext()

    def choose_dtype(self, asked: str, checkpoint_dtype: str, is_quantized: bool) -> torch.dtype:
        if asked == "auto":
            return self.features.choose_dtype(checkpoint_dtype, is_quantized)
        return super().choose_dtype(asked, checkpoint_dtype, is_quantized)

    def reads_quantized(self, kind: str, dtype: torch.dtype) -> bool:
        return kind == "gguf" and self.features.runs_kernels(dtype)

    def ops(self, dtype: torch.dtype) -> Ops:
        if not self.features.runs_kernels(dtype):
            if not self.features.has_compiler:
                logger.info("no compiled CPU kernels (numba fails to load): decoding is slower")
            return TorchOps(self.features.matmul_dtype(dtype))
        from nanovllm.devices.cpu.ops import NumbaOps
        from nanovllm.devices.cpu.program import Launcher

        return NumbaOps(Launcher(dtype, self.chooser), self.features)

    def attention(self, dtype: torch.dtype, ops: Ops) -> AttentionBackend:
        self.check_attention()
        block_size, matmul_dtype = self.config.kvcache_block_size, self.features.matmul_dtype(dtype)
        if self.config.attention_backend == "sdpa" or isinstance(ops, TorchOps):
            return SdpaAttention(block_size, matmul_dtype)
        from nanovllm.devices.cpu.numba_attention import NumbaAttention
        from nanovllm.devices.cpu.ops import NumbaOps

        assert isinstance(ops, NumbaOps)
        return NumbaAttention(block_size, ops.launcher, matmul_dtype)

    def runner(self, eager: EagerForward) -> ModelRunner:
        runner, ops, config = super().runner(eager), eager.model.lm_head.ops, self.config
        if isinstance(ops, TorchOps):
            return runner
        from nanovllm.devices.cpu.captured_forward import CapturedForward, one_row
        from nanovllm.devices.cpu.ops import NumbaOps  # needs numba

        is_eager = config.enforce_eager or config.attention_backend != "auto"
        is_eager |= not isinstance(eager.model, DecoderModel)  # transformers' code calls torch
        # A captured program contains only our kernels; tensor parallelism also needs all_reduce.
        if is_eager or not self.group.is_alone:
            eager.model(eager.batch(one_row()))  # compile the kernels before the first request
            return runner
        assert isinstance(ops, NumbaOps)
        runner.forward = captured = CapturedForward(eager, ops, config.max_model_len)
        captured.prepare()
        return runner
