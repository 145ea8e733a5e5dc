"""One CUDA device: Triton kernels, CUDA graphs, asynchronous copies, and KV-cache sizing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.devices.cuda.compile_ahead import compile_ahead, is_first_use, marker_path
from nanovllm.devices.cuda.graph_pool import GraphPool
from nanovllm.devices.cuda.kernels import masks
from nanovllm.devices.cuda.kernels import token_logprobs as logprobs
from nanovllm.devices.cuda.memory import GIB, MemoryAccount
from nanovllm.devices.cuda.ops import TritonOps
from nanovllm.devices.cuda.persistent import build
from nanovllm.devices.cuda.prefill_graphs import (
    Bucket,
    PrefillGraphs,
    bucket_sizes,
    count_many_tokens,
    max_chunks,
)
from nanovllm.devices.cuda.steps import CudaSteps
from nanovllm.devices.cuda.triton_attention import TritonAttention
from nanovllm.devices.cuda.triton_sampler import TritonSampler
from nanovllm.engine.step import Pending
from nanovllm.errors import ConfigError
from nanovllm.models.decoder import DecoderModel
from nanovllm.ops.interface import Ops
from nanovllm.ops.tp_group import ALONE, TPGroup
from nanovllm.worker.device_interface import Memory
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from nanovllm.devices.cuda.persistent.persistent_step import PersistentStep
    from nanovllm.models.registry import Model
    from nanovllm.worker.load_model import LoadedModel
    from nanovllm.worker.memory_needs import MemoryNeeds

logger = logging.getLogger(__name__)

KERNEL_OPTIONS = (  # options that determine which kernels are compiled
    "max_num_rows",
    "num_speculative_tokens",
    "max_num_batched_tokens",
    "max_model_len",
    "kvcache_block_size",
    "attention_backend",
    "enforce_eager",
    "model",  # its weights may be quantized, which needs other kernels
    "quantization",
    "kv_cache_dtype",
)
MIN_PROCESSES, MAX_PROCESSES = 4, 12  # compiler processes; with fewer than 4 cores, none
DRIVER_BYTES = 1 << 29  # memory that graphs use in addition to logits and activations


class CudaDevice:
    """A GPU whose work is queued on a single stream, so that KV-cache blocks are reused safely."""

    depth = 1
    name = "cuda"
    token_logprobs = staticmethod(logprobs.token_logprobs)
    apply_token_bitmask = staticmethod(masks.apply_token_bitmask)
    persistent: PersistentStep | None = None  # None if unsupported by the model, or without graphs

    def __init__(self, config: EngineConfig, group: TPGroup = ALONE) -> None:
        self.config, self.group = config, group
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.device_name = torch.cuda.get_device_name(self.torch_device)
        self._stream = torch.cuda.default_stream(self.torch_device)
        self.graph_pool = GraphPool(self.torch_device, has_kernels=config.optimizes_latency)

    def for_draft_model(self, config: EngineConfig) -> CudaDevice:
        return CudaDevice(config, self.group)

    def in_order(self, num_tokens: int = 0) -> AbstractContextManager[object]:
        """Return a context that makes the device and its stream current in the calling thread."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def choose_dtype(self, asked: str, checkpoint_dtype: str, is_quantized: bool) -> torch.dtype:
        is_auto = asked == "auto"
        dtype: torch.dtype = getattr(torch, checkpoint_dtype if is_auto else asked)
        if is_auto and dtype == torch.bfloat16:
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            return torch.bfloat16 if has_bf16 else torch.float16
        return dtype

    def check_fp8(self, head_dim: int) -> None:
        if head_dim <= 16:
            raise ConfigError(
                f"kv_cache_dtype='fp8' needs head_dim > 16 on GPUs, got {head_dim}; leave it out"
            )
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if (major, minor) < (8, 9):
            raise ConfigError(
                "kv_cache_dtype='fp8' needs a GPU with compute capability 8.9 or later, but "
                f"{self.device_name} has {major}.{minor}; leave it out"
            )

    def reads_quantized(self, kind: str, dtype: torch.dtype) -> bool:
        if kind == "gguf":
            return False
        capability = torch.cuda.get_device_capability(self.torch_device)
        has_kernel = capability >= ((8, 9) if kind == "fp8" else (8, 0))
        return has_kernel and dtype in (torch.bfloat16, torch.float16)

    def ops(self, dtype: torch.dtype) -> Ops:
        return TritonOps()

    def attention(self, dtype: torch.dtype, ops: Ops) -> AttentionBackend:
        block_size, name = self.config.kvcache_block_size, self.config.attention_backend
        if name == "sdpa":
            return SdpaAttention(block_size)
        if name == "flash_attn":
            from nanovllm.devices.cuda.flash_attention import load_flash_attention

            return load_flash_attention(self, block_size, dtype)
        properties = torch.cuda.get_device_properties(self.torch_device)
        return TritonAttention(self, properties.multi_processor_count, properties.major == 9)

    def memory(self) -> Memory:
        device = self.torch_device
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Memory(free + unused, total)

    def has_room_for_copy(self, num_bytes: int) -> bool:
        return False

    def estimate_graphs(self, step_bytes: int) -> int:
        return step_bytes + DRIVER_BYTES if self.uses_graphs else 0

    def cache_budget(self, needs: MemoryNeeds) -> int:
        return max(self._account(self.memory(), needs).room, 0)

    def cache_bytes(self, needs: MemoryNeeds, wanted: int) -> int:
        account = self._account(self._unreserved(), needs)
        granted = account.grant(wanted)
        logger.info("KV cache: %.2f GiB (%s)", granted / GIB, account)
        return granted

    def check_cache_bytes(self, needs: MemoryNeeds, num_bytes: int) -> None:
        self._account(self._unreserved(), needs).check(num_bytes)

    def allocate_cache(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def release(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch._C._cuda_clearCublasWorkspaces()  # includes the workspace of the capture stream
        torch.cuda.empty_cache()

    def fill(self, target: Tensor, rows: Tensor) -> None:
        with self.in_order():
            pinned = self.pinned(target)
            # A direct copy from the memory-mapped file would run on a single driver thread.
            pinned.copy_(rows)
            target.copy_(pinned, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()  # the pinned buffer must not be reused before the copy completes

    def upload(self, array: np.ndarray) -> Tensor:
        return self._pin(array).to(self.torch_device, non_blocking=True)

    def send(self, array: np.ndarray, target: Tensor) -> None:
        """Copy an array to the beginning of a tensor, asynchronously."""
        target[: len(array)].copy_(self._pin(array), non_blocking=True)

    def host_memory(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        pinned = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        memory: npt.NDArray[np.int32] = pinned.numpy()
        return memory

    def is_pinned(self, array: np.ndarray) -> bool:
        return torch.from_numpy(array).is_pinned()

    def readable(self, array: np.ndarray) -> Tensor:
        """Return a tensor that kernels can read: the array itself if pinned, else a device copy.

        Kernels read pinned memory only once, which takes no longer than a copy would.
        """
        return torch.from_numpy(array) if self.is_pinned(array) else self.upload(array)

    def fetch(self, *tensors: Tensor) -> Pending[list[np.ndarray]]:
        """Copy tensors to the host asynchronously.

        Tensors that are already on the host are pinned buffers that queued kernels write.
        """
        pinned = [self.pinned(t) if t.is_cuda else t for t in tensors]
        for target, tensor in zip(pinned, tensors, strict=True):
            if target is not tensor:
                target.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._stream)  # the current stream; passing it saves a lookup

        # Does not refer to tensors on the device, so that their memory is free for queued kernels.
        is_buffer = [mine is t for mine, t in zip(pinned, tensors, strict=True)]

        def wait() -> list[np.ndarray]:
            arrived.synchronize()
            pairs = zip(pinned, is_buffer, strict=True)
            return [mine.numpy().copy() if is_reused else mine.numpy() for mine, is_reused in pairs]

        return Pending(wait)

    def pinned(self, like: Tensor) -> Tensor:
        """Allocate pinned host memory with the shape and dtype of `like`."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def _pin(self, array: np.ndarray) -> Tensor:
        """Copy an array to pinned memory, which torch reuses only once copies from it are done."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        pinned = self.pinned(source)
        # Copy with numpy: torch's threads would spin for milliseconds after a large copy.
        pinned.numpy()[...] = source.numpy()
        return pinned

    def sampler(self, input_batch: InputBatch, vocab_size: int) -> TritonSampler:
        return TritonSampler(input_batch, vocab_size, self.group)

    def prepare(self, loaded: LoadedModel, largest_step: Callable[[], EagerForward]) -> MemoryNeeds:
        model, graph_bytes = loaded.model, 0
        if isinstance(model, DecoderModel):
            if self.uses_graphs:
                self.persistent = build(model, loaded.spec)
            self.compile_ahead(model, largest_step)
        step_bytes = self.profile(largest_step)
        if self.uses_graphs:
            graph_bytes = self._count_graph_bytes(model, loaded.num_slots, step_bytes)
        return replace(loaded.needs, step=step_bytes, graphs=graph_bytes)

    def runner(self, eager: EagerForward) -> ModelRunner:
        if not self.uses_graphs:
            sampler = self.sampler(eager.input_batch, eager.model.config.vocab_size)
            return ModelRunner(eager, eager, sampler)
        steps = self.steps(eager)
        capture = steps.capture_all if self.config.optimizes_latency else steps.capture_first
        try:
            capture()
        except torch.AcceleratorError as error:
            if isinstance(eager.model, DecoderModel):
                raise
            raise ConfigError(
                f"the model code of {eager.model.config.architecture} cannot be captured in CUDA "
                f"graphs ({error!s:.200}); set enforce_eager=True"
            ) from error
        return ModelRunner(eager, steps, steps.sample, steps)

    @property
    def uses_graphs(self) -> bool:
        return not self.config.enforce_eager and self.config.attention_backend != "sdpa"

    def compile_ahead(self, model: DecoderModel, largest_step: Callable[[], EagerForward]) -> None:
        """Compile the kernels of all steps in parallel, unless they are already compiled.

        Skipped with few cores, where it does not pay off, and in a tensor-parallel group, whose
        ranks would all compile the same kernels.
        """
        num_processes = min(MAX_PROCESSES, os.cpu_count() or 1)
        if num_processes < MIN_PROCESSES or not self.group.is_alone or not is_first_use():
            return
        options = [getattr(self.config, name) for name in KERNEL_OPTIONS]
        marker = marker_path(options, model.config, self.device_name, model.dtype)
        if marker.exists():
            return
        logger.warning("Compiling the CUDA kernels (10 to 30 seconds, once per configuration)")
        compile_ahead(lambda: self.warm_up(largest_step()), num_processes)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()

    def warm_up(self, eager: EagerForward) -> None:
        """Launch the kernels that steps may use, if steps use graphs."""
        if self.uses_graphs:
            self.steps(eager).warm_up()

    def profile(self, largest_step: Callable[[], EagerForward]) -> int:
        """Return the peak memory of the largest step."""
        device = self.torch_device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        largest_step()
        torch.cuda.synchronize(device)
        step_bytes = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return step_bytes

    def steps(self, eager: EagerForward) -> CudaSteps:
        attention, prefill = eager.attention, None
        if isinstance(attention, TritonAttention):
            sizes = self.prefill_sizes(eager.model.config, eager.input_batch.num_slots)
            prefill = PrefillGraphs(eager, attention, self, sizes)
        return CudaSteps(eager, self, prefill)

    def prefill_sizes(self, model: ModelConfig, num_slots: int) -> list[Bucket]:
        most = count_many_tokens(model)
        sizes = bucket_sizes(self._max_tokens(num_slots), num_slots, most)
        return sizes if model.recurrent is None else [size.with_chunks() for size in sizes]

    def _max_tokens(self, num_slots: int) -> int:
        """Return the maximum number of tokens in a step."""
        return min(self.config.max_num_batched_tokens, num_slots * self.config.max_model_len)

    def _count_graph_bytes(self, model: Model, num_slots: int, step_bytes: int) -> int:
        """Estimate the memory of the graphs: logits, activations, and driver memory.

        All graphs share the buffers of the largest. Activations are assumed to be proportional to
        the number of tokens or, if that gives more, of the chunks of recurrent layers. In a
        tensor-parallel group, the logits exist three times while the ranks' shards are gathered and
        concatenated.
        """
        num_rows = num_slots * (1 if self.group.is_alone else 3)
        num_bytes = num_rows * model.config.vocab_size * 4 + DRIVER_BYTES  # float32
        if self.config.attention_backend == "flash_attn":
            return num_bytes  # without prefill graphs
        largest, most = self.prefill_sizes(model.config, num_slots)[-1], self._max_tokens(num_slots)
        share = largest.num_tokens / most
        share = max(share, largest.num_chunks / max_chunks(most, num_slots))
        return num_bytes + int(share * step_bytes)

    def _unreserved(self) -> Memory:
        """Return the memory, without the gaps in torch's segments: the KV cache fits in none."""
        return Memory(*torch.cuda.mem_get_info(self.torch_device))

    def _account(self, memory: Memory, needs: MemoryNeeds) -> MemoryAccount:
        held, share = memory.total - memory.free, self.config.gpu_memory_utilization
        return MemoryAccount(memory.total, share, held, needs.step, needs.graphs)
