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
    from nanovllm.ops.interface import Ops
    from nanovllm.ops.tp_group import TPGroup
    from nanovllm.worker.forward import EagerForward, Sampled, StepLogits
    from nanovllm.worker.input_batch import InputBatch
    from nanovllm.worker.load_model import LoadedModel
    from nanovllm.worker.memory_needs import MemoryNeeds
    from nanovllm.worker.model_runner import ModelRunner, Sampler


@dataclass(frozen=True, slots=True)
class Memory:
    free: int  # bytes
    total: int


class Device(Protocol):
    """The operations that the worker needs from a device."""

    torch_device: torch.device
    group: TPGroup  # tensor-parallel ranks that share the model
    depth: int  # default pipeline depth (steps queued ahead): the fastest in benchmarks
    name: str  # "cpu" or "cuda"
    device_name: str  # the vendor's product name

    def in_order(self, num_tokens: int = 0) -> AbstractContextManager[object]:
        """Return a context in which work is queued in order, as on one CUDA stream.

        `num_tokens` is the number of tokens of the step that runs in it, if any. A CPU chooses the
        number of threads from the durations of steps.
        """

    # Building models.

    def for_draft_model(self, config: EngineConfig) -> Device:
        """Create a second object for this device, with separate graphs, for the draft model."""

    def choose_dtype(self, asked: str, checkpoint_dtype: str, is_quantized: bool) -> torch.dtype:
        """Resolve the `dtype` option `asked`; "auto" depends on the checkpoint."""

    def check_fp8(self, head_dim: int) -> None:
        """Raise ConfigError if no kernel supports an FP8 KV cache with this head size."""

    def reads_quantized(self, kind: str, dtype: torch.dtype) -> bool:
        """Return whether kernels read weights of this QuantLayout.kind with activations of `dtype`.

        The kind "gguf" covers all GGUF types.
        """

    def ops(self, dtype: torch.dtype) -> Ops:
        """Create the operations other than attention."""

    def attention(self, dtype: torch.dtype, ops: Ops) -> AttentionBackend:
        """Create the backend for attention over the paged KV cache."""

    # Memory.

    def memory(self) -> Memory:
        """Return this rank's share of the device's memory."""

    def has_room_for_copy(self, num_bytes: int) -> bool:
        """Return whether weights of `num_bytes` may be kept in two layouts at once."""

    def estimate_graphs(self, step_bytes: int) -> int:
        """Estimate, before `prepare`, the memory of graphs from that of the largest step."""

    def cache_budget(self, needs: MemoryNeeds) -> int:
        """Estimate, before `prepare`, how many bytes the KV cache and recurrent states may use."""

    def cache_bytes(self, needs: MemoryNeeds, wanted: int) -> int:
        """Return how many of the `wanted` bytes the KV cache may use; log how that was computed."""

    def check_cache_bytes(self, needs: MemoryNeeds, num_bytes: int) -> None:
        """Raise ConfigError if a KV cache of the configured size, `num_bytes`, cannot fit."""

    def allocate_cache(self, num_bytes: int) -> Tensor:
        """Allocate zeroed bytes; where possible, their pages are allocated only on first use."""

    def release(self) -> None:
        """Free memory that allocators hold in their caches."""

    # Copies.

    def fill(self, target: Tensor, rows: Tensor) -> None:
        """Copy rows read from a checkpoint to `target`, and wait. Safe in any thread."""

    def upload(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device without waiting; the array must not change afterwards."""

    def host_memory(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """Allocate an int32 array, in pinned memory on GPUs, that `readable` does not copy."""

    def readable(self, array: np.ndarray) -> Tensor:
        """Return the array as a tensor for kernels; it must not change until they have run."""

    def fetch(self, *tensors: Tensor) -> Pending[list[np.ndarray]]:
        """Start copying tensors to the host; the result waits for the copies."""

    # Sampling and steps.

    def token_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `torch_logits.token_logprobs`."""

    def apply_token_bitmask(self, logits: Tensor, rows: Tensor | None, masks: Tensor) -> None:
        """See `torch_logits.apply_token_bitmask`, where `masks` is called `words`."""

    def sampler(self, input_batch: InputBatch, vocab_size: int) -> Sampler:
        """Create the function that samples tokens from logits."""

    def prepare(self, loaded: LoadedModel, largest_step: Callable[[], EagerForward]) -> MemoryNeeds:
        """Compile the kernels for a loaded model; run `largest_step` to measure its peak memory.

        Return the model's MemoryNeeds, with the memory that steps and graphs take.
        """

    def runner(self, eager: EagerForward) -> ModelRunner:
        """Create the ModelRunner; it replays captured graphs where that is faster."""


class CapturedSteps(Protocol):
    """The captured steps of a device, which its Forward and Sampler replay."""

    def note(self, plan: StepPlan) -> None:
        """Record the new sequences of a plan that runs eagerly instead of being replayed."""

    def replay_masked(self, logits: StepLogits, plan: StepPlan, masks: IntColumn) -> Sampled | None:
        """Sample with bitmasks; if no captured step supports that, do nothing and return None."""

    def has_lost_step(self) -> bool:
        """Return whether a step failed on the device; later steps in flight are invalid, too.

        The device may then run later steps in another way.
        """

    def capture_one(self) -> bool:
        """See `Executor.capture_one`."""
