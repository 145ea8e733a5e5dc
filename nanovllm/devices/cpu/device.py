"""The CPU device: chooses the dtype, compiled or torch kernels, and captured or eager steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.contention import ThreadChooser
from nanovllm.devices.cpu.features import CpuFeatures, find_cpu_features
from nanovllm.engine.step import StepPlan
from nanovllm.models.decoder import DecoderModel
from nanovllm.ops.interface import Ops
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.ops.tp_group import ALONE, TPGroup
from nanovllm.worker.forward import EagerForward, Sampled, StepLogits
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.torch_device import TorchDevice

if TYPE_CHECKING:
    from nanovllm.devices.cpu.ops import NumbaOps

logger = logging.getLogger(__name__)


class CpuDevice(TorchDevice):
    """A CPU with kernels compiled by numba; without numba or for float16, it uses torch."""

    def __init__(
        self, config: EngineConfig, group: TPGroup = ALONE, features: CpuFeatures | None = None
    ) -> None:
        super().__init__(config, group)
        self.features = features or find_cpu_features()

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

        return NumbaOps(Launcher(dtype), self.features)

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
        runner, ops = self._runner(eager), eager.model.lm_head.ops
        # Ranks wait for each other, which looks as if their threads had no cores.
        if torch.get_num_threads() == 1 or not self.group.is_alone:
            return runner
        if isinstance(ops, TorchOps):
            choose_threads(runner, ThreadChooser(torch.get_num_threads()))
        else:
            choose_threads(runner, cast("NumbaOps", ops).launcher.chooser)
        return runner

    def _runner(self, eager: EagerForward) -> ModelRunner:
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


def choose_threads(runner: ModelRunner, chooser: ThreadChooser) -> None:
    """Make every step run on the number of threads that is the fastest at the time."""
    forward, sampler = runner.forward, runner.sampler

    def run_forward(plan: StepPlan) -> StepLogits:
        return chooser.run(lambda: forward(plan), int(plan.counts.sum()))

    def run_sampler(logits: StepLogits, plan: StepPlan) -> Sampled:
        with chooser.limit_torch():
            return sampler(logits, plan)

    runner.forward, runner.sampler = run_forward, run_sampler
