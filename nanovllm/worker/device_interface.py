"""Device: everything that differs between devices; one object for each rank, created at start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.engine.step import Pending

if TYPE_CHECKING:
    from nanovllm.attention.backend import AttentionBackend
    from nanovllm.models.decoder import DecoderModel
    from nanovllm.ops.interface import Ops
    from nanovllm.ops.tp_group import TPGroup
    from nanovllm.worker.forward import EagerForward
    from nanovllm.worker.input_batch import InputBatch
    from nanovllm.worker.kv_cache import KVCacheSpec
    from nanovllm.worker.model_runner import ModelRunner, Sampler


@dataclass(frozen=True, slots=True)
class Memory:
    free: int  # bytes
    total: int


class Device(Protocol):
    torch_device: torch.device
    group: TPGroup  # the ranks that share a model
    depth: int  # the pipeline depth that measured fastest
    name: str  # "cpu" or "cuda"
    device_name: str  # the vendor's name

    def in_order(self) -> AbstractContextManager[object]:
        """Queue all work of this context behind what was queued in such a context before."""

    # What models consist of here.

    def choose_dtype(self, asked: str, checkpoint_dtype: str) -> torch.dtype:
        """Resolve `dtype`, which may be "auto", for a checkpoint stored as `checkpoint_dtype`."""

    def check_fp8(self, head_dim: int) -> None:
        """Raise ConfigError if no kernel reads an FP8 KV cache."""

    def reads_quantized(self, kind: str, dtype: torch.dtype) -> bool:
        """Whether kernels read weights quantized to a kind of layout, for activations of `dtype`.

        "gguf" stands for all types of GGUF.
        """

    def ops(self, dtype: torch.dtype) -> Ops:
        """Make the operations between attention calls."""

    def attention(self, dtype: torch.dtype, ops: Ops) -> AttentionBackend:
        """Make attention over the paged cache."""

    # Memory.

    def memory(self) -> Memory:
        """Return what one rank has of the device's memory."""

    def has_room_for_copy(self, num_bytes: int) -> bool:
        """Whether weights of `num_bytes` may be kept in two layouts."""

    def cache_bytes(self, wanted: int) -> int:
        """Return how many of the `wanted` bytes the KV cache may take, and log why."""

    def check_cache_bytes(self, num_bytes: int) -> None:
        """Raise ConfigError if a KV cache of the size that the user asked for cannot fit."""

    def allocate_cache(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes; pages are touched only when used where the device allows it."""

    def release(self) -> None:
        """Return memory to the device that nothing refers to any more."""

    # Copies.

    def fill(self, target: Tensor, rows: Tensor) -> None:
        """Copy some rows of a stored weight and wait for them; any thread may call this."""

    def upload(self, array: np.ndarray) -> Tensor:
        """Return the array on the device, without waiting; it must not change afterwards."""

    def host_memory(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """Return memory of the host that `readable` need not copy."""

    def readable(self, array: np.ndarray) -> Tensor:
        """Return the array where kernels can read it; it must not change until they have."""

    def fetch(self, *tensors: Tensor) -> Pending[list[np.ndarray]]:
        """Start copying some tensors to the host."""

    # Steps.

    def token_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `torch_sampling.token_logprobs`."""

    def keep_allowed(self, logits: Tensor, rows: Tensor | None, masks: Tensor) -> None:
        """See `torch_sampling.keep_allowed`."""

    def sampler(self, tables: InputBatch, vocab_size: int) -> Sampler:
        """Make what draws tokens from logits."""

    def prepare(
        self, model: DecoderModel, cache: KVCacheSpec, largest_step: Callable[[], EagerForward]
    ) -> None:
        """Build and compile what steps of a loaded model need, and measure the largest one."""

    def runner(self, eager: EagerForward) -> ModelRunner:
        """Make what runs steps: captured ones where the device gains by them."""
