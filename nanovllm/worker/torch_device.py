"""A CPU device in plain torch, the reference for devices with kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.config import EngineConfig
from nanovllm.engine.step import Pending
from nanovllm.errors import ConfigError
from nanovllm.ops import torch_logits
from nanovllm.ops.interface import Ops
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.ops.tp_group import ALONE, TPGroup
from nanovllm.worker.device_interface import Memory
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.host_memory import (
    GIB,
    allocate_lazily,
    available_memory,
    total_memory,
    trim_malloc,
)
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.sampler import TorchSampler

if TYPE_CHECKING:
    from nanovllm.worker.load_model import LoadedModel
    from nanovllm.worker.memory_needs import MemoryNeeds

logger = logging.getLogger(__name__)


class TorchDevice:
    """A CPU without compiled kernels.

    Each step runs synchronously in `submit`, so a pipeline depth above 0 would only delay results.
    """

    torch_device = torch.device("cpu")
    depth = 0  # the fastest in benchmarks/engine/cpu_choices.py
    name = device_name = "cpu"
    token_logprobs = staticmethod(torch_logits.token_logprobs)
    apply_token_bitmask = staticmethod(torch_logits.apply_token_bitmask)

    def __init__(self, config: EngineConfig, group: TPGroup = ALONE) -> None:
        self.config, self.group = config, group
        self.num_ranks = group.size * config.data_parallel_size  # ranks that share this memory
        self._allocated_bytes = 0  # size of all caches; most of their pages are not in use yet

    def for_draft_model(self, config: EngineConfig) -> TorchDevice:
        return type(self)(config, self.group)

    def in_order(self, num_tokens: int = 0) -> AbstractContextManager[object]:
        return nullcontext()

    def choose_dtype(self, asked: str, checkpoint_dtype: str, is_quantized: bool) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, "float32" if asked == "auto" else asked)
        return dtype

    def check_fp8(self, head_dim: int) -> None: ...

    def reads_quantized(self, kind: str, dtype: torch.dtype) -> bool:
        return False

    def ops(self, dtype: torch.dtype) -> Ops:
        return TorchOps()

    def attention(self, dtype: torch.dtype, ops: Ops) -> AttentionBackend:
        self.check_attention()
        return SdpaAttention(self.config.kvcache_block_size)

    def check_attention(self) -> None:
        name = self.config.attention_backend
        if name not in ("auto", "sdpa"):
            raise ConfigError(
                f"attention_backend={name!r} needs a CUDA device, but the engine runs on the "
                "cpu; use 'auto' or 'sdpa'"
            )

    def memory(self) -> Memory:
        return Memory(available_memory() // self.num_ranks, total_memory() // self.num_ranks)

    def has_room_for_copy(self, num_bytes: int) -> bool:
        # The choice depends on total, not free, memory, so that outputs do not vary between runs.
        return num_bytes * self.num_ranks <= total_memory() // 8

    def estimate_graphs(self, step_bytes: int) -> int:
        return 0

    def cache_budget(self, needs: MemoryNeeds) -> int:
        # The other three quarters are left to steps and other processes.
        return available_memory() // 4 // self.num_ranks - self._allocated_bytes

    def cache_bytes(self, needs: MemoryNeeds, wanted: int) -> int:
        share = self.cache_budget(needs)
        granted = min(wanted, share)
        text = "KV cache: %.2f GiB (all sequences at full length: %.2f, a quarter of memory: %.2f)"
        logger.info(text, granted / GIB, wanted / GIB, share / GIB)
        return granted

    def check_cache_bytes(self, needs: MemoryNeeds, num_bytes: int) -> None:
        """Accept any size: pages are allocated on first use."""

    def allocate_cache(self, num_bytes: int) -> Tensor:
        self._allocated_bytes += num_bytes
        return allocate_lazily(num_bytes)

    def release(self) -> None:
        trim_malloc()

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

    def sampler(self, input_batch: InputBatch, vocab_size: int) -> TorchSampler:
        return TorchSampler(input_batch, self.group)

    def prepare(self, loaded: LoadedModel, largest_step: Callable[[], EagerForward]) -> MemoryNeeds:
        return loaded.needs  # not measured: activations are small compared to host memory

    def runner(self, eager: EagerForward) -> ModelRunner:
        sampler = self.sampler(eager.input_batch, eager.model.lm_head.vocab_size)
        return ModelRunner(eager, eager, sampler)
