"""The CPU: a dtype by its features, compiled kernels where they can be, and recordings of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.features import CpuFeatures, find_cpu_features
from nanovllm.devices.cpu.memory import (
    GIB,
    allocate_lazily,
    available_memory,
    give_back,
    total_memory,
)
from nanovllm.engine.pending import Pending
from nanovllm.engine.step import StepPlan
from nanovllm.errors import ConfigError
from nanovllm.models.decoder import DecoderModel
from nanovllm.ops import torch_sampling
from nanovllm.ops.interface import Ops
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.ops.tp_group import ALONE, TPGroup
from nanovllm.worker.device import Memory
from nanovllm.worker.forward import EagerForward, Sampled, StepLogits
from nanovllm.worker.input_batch import SlotTables
from nanovllm.worker.kv_cache import KVCacheSpec
from nanovllm.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class CpuDevice:
    """Runs each step inside `submit`, so a pipeline deeper than 0 would only delay results."""

    torch_device = torch.device("cpu")
    depth = 0  # benchmarks/engine/cpu_choices.py
    name = device_name = "cpu"
    token_logprobs = staticmethod(torch_sampling.token_logprobs)
    keep_allowed = staticmethod(torch_sampling.keep_allowed)

    def __init__(
        self, config: EngineConfig, group: TPGroup = ALONE, features: CpuFeatures | None = None
    ) -> None:
        self.config, self.group = config, group
        self.num_ranks = group.size * config.data_parallel_size  # that share this machine's memory
        self.features = features or find_cpu_features()

    def in_order(self) -> AbstractContextManager[object]:
        return nullcontext()

    def choose_dtype(self, asked: str, checkpoint_dtype: str) -> torch.dtype:
        if asked == "auto":
            return self.features.choose_dtype(checkpoint_dtype)
        dtype: torch.dtype = getattr(torch, asked)
        return dtype

    def check_fp8(self, head_dim: int) -> None: ...

    def reads_quantized(self, kind: str, dtype: torch.dtype) -> bool:
        return kind == "gguf" and self.features.runs_kernels(dtype)

    def ops(self, dtype: torch.dtype) -> Ops:
        if not self.features.runs_kernels(dtype):
            if not self.features.has_compiler:
                logger.info("no compiled CPU kernels (numba is missing): decoding will be slower")
            return TorchOps(self.features.product_dtype(dtype))
        from nanovllm.devices.cpu.ops import NumbaOps
        from nanovllm.devices.cpu.program import Launcher

        return NumbaOps(Launcher(dtype), self.features)

    def attention(self, dtype: torch.dtype, ops: Ops) -> AttentionBackend:
        block_size, name = self.config.kvcache_block_size, self.config.attention_backend
        product_dtype = self.features.product_dtype(dtype)
        if name not in ("auto", "sdpa"):
            raise ConfigError(
                f"attention_backend={name!r} needs a CUDA device, but the engine runs on the "
                "cpu; use 'auto' or 'sdpa'"
            )
        if name == "sdpa" or ops.launcher is None:
            return SdpaAttention(block_size, product_dtype)
        from nanovllm.devices.cpu.numba_attention import NumbaAttention

        return NumbaAttention(block_size, ops.launcher, product_dtype)

    def memory(self) -> Memory:
        return Memory(available_memory() // self.num_ranks, total_memory() // self.num_ranks)

    def has_room_for_copy(self, num_bytes: int) -> bool:
        # By the memory there is, not by what is free: answers must not change between runs.
        return num_bytes * self.num_ranks <= total_memory() // 8

    def cache_bytes(self, wanted: int) -> int:
        share = available_memory() // 4 // self.num_ranks
        granted = min(wanted, share)
        logger.info(
            "KV cache: %.2f GiB (every sequence at full length: %.2f, a quarter of memory%s: %.2f)",
            granted / GIB,
            wanted / GIB,
            "" if self.num_ranks == 1 else f" over {self.num_ranks} ranks",
            share / GIB,
        )
        return granted

    def check_cache_bytes(self, num_bytes: int) -> None:
        """Accept any size: pages are allocated on first use."""

    def allocate_cache(self, num_bytes: int) -> Tensor:
        return allocate_lazily(num_bytes)

    def release(self) -> None:
        give_back()

    def fill(self, target: Tensor, rows: Tensor) -> None:
        target.copy_(rows)

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def host_memory(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return np.empty(shape, np.int32)

    def readable(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def fetch(self, *tensors: Tensor) -> Pending[list[np.ndarray]]:
        return Pending(lambda: [tensor.numpy() for tensor in tensors])

    def sampler(self, tables: SlotTables, vocab_size: int) -> TorchSampler:
        return TorchSampler(tables, self.group)

    def prepare(
        self, model: DecoderModel, cache: KVCacheSpec, largest_step: Callable[[], EagerForward]
    ) -> None:
        """Do nothing: `ops` compiled every kernel, and activations are small beside memory."""

    def runner(self, eager: EagerForward) -> ModelRunner:
        ops, config = eager.model.lm_head.ops, self.config
        sampler = self.sampler(eager.tables, eager.model.lm_head.vocab_size)
        if ops.launcher is None:
            return ModelRunner(eager, eager, sampler)
        from nanovllm.devices.cpu.ops import NumbaOps  # needs numba
        from nanovllm.devices.cpu.recorded_forward import RecordedForward, one_row

        is_eager = config.enforce_eager or config.attention_backend != "auto"
        # A recording holds kernels alone, and a group's sums stand between them.
        if is_eager or not self.group.is_alone:
            eager.model(eager.batch(one_row()))  # compiles what the first step would
            return ModelRunner(eager, eager, sampler)
        assert isinstance(ops, NumbaOps)
        recorded = RecordedForward(eager, ops, config.max_model_len)
        recorded.prepare()
        return ModelRunner(eager, recorded, sampler)


@dataclass(frozen=True, slots=True)
class TorchSampler:
    """Samples tokens into the tables, where the next step reads them."""

    tables: SlotTables
    group: TPGroup

    def __call__(self, logits: StepLogits, plan: StepPlan) -> Sampled:
        tables, slots, positions = self.tables, logits.slots.long(), logits.positions.long()
        if not len(slots):
            return Sampled(slots.int())
        tokens = torch.empty_like(slots, dtype=torch.int32)
        if self.group.rank == 0:
            columns = tables.sampling_columns.select(slots)
            tokens.copy_(torch_sampling.sample(logits.values, columns, positions))
        self.group.broadcast(tokens)
        tables.tokens[slots, positions] = tokens.clamp(min=0)  # NO_TOKEN has no embedding
        tables.lengths[slots] = logits.positions + 1
        return Sampled(tokens)
