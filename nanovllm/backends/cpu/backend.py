"""What runs a model on a CPU: compiled kernels where they can be, and recordings of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.attention import create_attention
from nanovllm.attention.base import AttentionBackend
from nanovllm.backends.cpu.sampler import TorchSampler
from nanovllm.config import EngineConfig
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels import create_cpu_ops
from nanovllm.kernels.kv_layout import KVCacheSpec
from nanovllm.kernels.ops import Ops
from nanovllm.models.decoder import DecoderModel
from nanovllm.platforms.cpu import CpuPlatform
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.runner import ModelRunner
from nanovllm.worker.tables import SlotTables


@dataclass(frozen=True, slots=True)
class CpuBackend:
    platform: CpuPlatform
    dtype: torch.dtype
    group: TPGroup
    ops: Ops
    attention: AttentionBackend
    config: EngineConfig

    def sampler(self, tables: SlotTables) -> TorchSampler:
        return TorchSampler(tables, self.group)

    def prepare(
        self, model: DecoderModel, cache: KVCacheSpec, largest_step: Callable[[], EagerForward]
    ) -> None:
        """Nothing is left to do: one compilation, with the ops, brings every kernel."""

    def runner(self, eager: EagerForward) -> ModelRunner:
        config, tables = self.config, eager.tables
        sampler = self.sampler(tables)
        if self.ops.launcher is None:
            return ModelRunner(eager, eager, sampler)
        from nanovllm.backends.cpu.recorded_forward import RecordedForward, one_row
        from nanovllm.kernels.cpu.ops import NumbaOps  # needs numba

        is_eager = config.enforce_eager or config.attention_backend != "auto"
        # A recording holds kernels alone, and a group's sums stand between them.
        if is_eager or not self.group.is_alone:
            eager.model(eager.batch(one_row()))  # compiles what the first step would
            return ModelRunner(eager, eager, sampler)
        assert isinstance(self.ops, NumbaOps)
        recorded = RecordedForward(eager, self.ops, config.max_model_len)
        recorded.prepare()
        return ModelRunner(eager, recorded, sampler)


def create_cpu_backend(
    platform: CpuPlatform, dtype: torch.dtype, group: TPGroup, config: EngineConfig
) -> CpuBackend:
    features = platform.features
    ops = create_cpu_ops(dtype, features)
    attention = create_attention(
        platform,
        ops,
        config.kvcache_block_size,
        config.attention_backend,
        dtype,
        features.product_dtype(dtype),
    )
    return CpuBackend(platform, dtype, group, ops, attention, config)
