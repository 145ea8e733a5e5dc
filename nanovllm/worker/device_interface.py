"""Device: the interface to everything that differs between devices; one object per rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.engine.step import IntColumn, Pending, StepPlan

if TYPE_CHECKING:
    from nanovllm.attention.backend import AttentionBackend
    from nanovllm.config import EngineConfig
    from nanovllm.models.registry import Model
    from nanovllm.ops.interface import Ops
    from nanovllm.ops.tp_group import TPGroup
    from nanovllm.worker.forward import EagerForward, Sampled, StepLogits
    from nanovllm.worker.input_batch import InputBatch
    from nanovllm.worker.kv_cache import KVCacheSpec
    from nanovllm.worker.model_runner import ModelRunner, Sampler


@dataclass(frozen=True, slots=True)
class Memory:
    free: int  # bytes
    total: int


class Device(Protocol):
    """The operations that the worker needs from a device."""

    torch_device: torch.device
    group: TPGroup  # tensor-parallel ranks that share the model
    depth: int  # default pipeline depth (steps queued ahead), the fastest in benchmarks
    name: str  # "cpu" or "cuda"
    device_name: str  # the vendor's product name

    def in_order(self) -> AbstractContextManager[object]:
        """Return a context in which work is queued in order, as on one CUDA stream."""

    # Building models.

    def for_draft_model(self, config: EngineConfig) -> Device:
        """Create the object of the same device for a second model, whose graphs are separate."""

    def choose_dtype(self, asked: str, checkpoint_dtype: str) -> torch.dtype:
        """Resolve `dtype`, which may be "auto", for a checkpoint stored as `checkpoint_dtype`."""

    def check_fp8(self, head_dim: int) -> None:
        """Raise ConfigError if no kernel supports an FP8 KV cache with this head size."""

    def reads_quantized(self, kind: str, dtype: torch.dtype) -> bool:
        """Return whether kernels support a QuantLayout.kind with activations of `dtype`.

        "gguf" stands for all GGUF types.
        """

    def ops(self, dtype: torch.dtype) -> Ops:
        """Create the operations other than attention."""

    def attention(self, dtype: torch.dtype, ops: Ops) -> AttentionBackend:
        """Create the backend for attention over the paged KV cache."""

    # Memory.

    def memory(self) -> Memory:
        """Return this rank's part of the device's memory."""

    def has_room_for_copy(self, num_bytes: int) -> bool:
        """Return whether there is room to keep weights of `num_bytes` in two layouts."""

    def cache_budget(self, step_bytes: int) -> int:
        """Estimate how many bytes KV cache and recurrent states may take, before `prepare`.

        The largest step takes about `step_bytes`.
        """

    def cache_bytes(self, wanted: int) -> int:
        """Return how many of the `wanted` bytes the KV cache may use; log how that was computed."""

    def check_cache_bytes(self, num_bytes: int) -> None:
        """Raise ConfigError if a KV cache of the size that the user requested cannot fit."""

    def allocate_cache(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes; where possible, pages are allocated only on first use."""

    def release(self) -> None:
        """Return unused cached memory to the device."""

    # Copies.

    def fill(self, target: Tensor, rows: Tensor) -> None:
        """Copy rows of a stored weight to the device and wait. Safe in any thread."""

    def upload(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device without waiting; the array must not change afterwards."""

    def host_memory(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """Allocate host memory, pinned if the device supports it, that `readable` does not copy."""

    def readable(self, array: np.ndarray) -> Tensor:
        """Return the array as a tensor for kernels; it must not change until they have run."""

    def fetch(self, *tensors: Tensor) -> Pending[list[np.ndarray]]:
        """Start copying tensors to the host; the result waits for the copies."""

    # Steps.

    def token_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `torch_logits.token_logprobs`."""

    def apply_token_bitmask(self, logits: Tensor, rows: Tensor | None, masks: Tensor) -> None:
        """See `torch_logits.apply_token_bitmask`; `masks` are its `words`."""

    def sampler(self, input_batch: InputBatch, vocab_size: int) -> Sampler:
        """Create the sampler, which draws tokens from logits."""

    def prepare(
        self, model: Model, cache: KVCacheSpec, largest_step: Callable[[], EagerForward]
    ) -> None:
        """Compile the kernels for a loaded model, and measure the memory of the largest step."""

    def runner(self, eager: EagerForward) -> ModelRunner:
        """Create the runner of steps; it replays captured graphs where that is faster."""


class CapturedSteps(Protocol):
    """The captured steps of a device, which its Forward and its Sampler replay."""

    def note(self, plan: StepPlan) -> None:
        """Register the new sequences of a plan that is run eagerly instead of replayed."""

    def replay_masked(self, logits: StepLogits, plan: StepPlan, masks: IntColumn) -> Sampled | None:
        """Sample with bitmasks; return None, and do nothing, if no captured step supports it."""

    def has_lost_step(self) -> bool:
        """Return whether a step failed on the device, which makes all later steps invalid, too."""

    def capture_one(self) -> bool:
        """See `Executor.capture_one`."""
