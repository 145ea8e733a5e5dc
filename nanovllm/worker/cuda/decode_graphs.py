"""Decode steps on CUDA: two graph replays, which read all they need from the tables."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention.base import DecodeRows, GraphedAttention, SharedRows
from nanovllm.attention.triton import TritonAttention
from nanovllm.engine.step import StepPlan
from nanovllm.kernels.cuda.elementwise import gather_decode
from nanovllm.kernels.ops import SamplingVariant
from nanovllm.layers.build import ForwardBatch
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.cuda.prefill_graphs import GraphedChunks
from nanovllm.worker.cuda.sampler import TritonSampler
from nanovllm.worker.cuda.shared_prefixes import MIN_ROWS, SharedPrefixes
from nanovllm.worker.forward import EagerForward, StepLogits
from nanovllm.worker.input_buffers import VARIANTS, is_decode

DRIVER_BYTES = 1 << 29  # what graphs take beside logits and activations


def graph_bytes(num_slots: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Return what graphs take beside activations; logits share the memory of the largest one's."""
    return num_slots * vocab_size * dtype.itemsize + DRIVER_BYTES


def graph_sizes(max_rows: int) -> list[int]:
    """Every size up to 16, then steps of an eighth of the power of two below; always max_rows.

    Those between 208 and 256 are left out: the libraries' products of 256 rows take no longer.
    """
    sizes, size = [], 1
    while size < max_rows:
        if not 208 < size < 256:
            sizes.append(size)
        size += max(1, (1 << size.bit_length()) // 16)
    return [*sizes, max_rows]


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """A decode step of one batch size; a graph's output is overwritten by the next replay."""

    run_model: Callable[[], None]
    run_whole: Callable[[], None] | None  # the same as one kernel, up to its `max_context`
    run_shared: Callable[[], None] | None  # the same for rows that share their first keys
    logits: Tensor  # [batch size, vocab_size]; other sizes' graphs use the same memory
    samplers: dict[SamplingVariant, tuple[Callable[[], None], Tensor]]


class GraphedSteps:
    """A Forward and, in `sample`, a Sampler that replay decode steps and pass on the others."""

    def __init__(
        self,
        eager: EagerForward,
        attention: GraphedAttention,
        sampler: TritonSampler,
        platform: CudaPlatform,
        max_model_len: int,
        chunks: GraphedChunks | None,
    ) -> None:
        self.eager = eager
        self.chunks = chunks
        self.attention = attention
        self.sampler = sampler
        self.platform = platform
        self.max_model_len = max_model_len
        num_slots = eager.buffers.num_slots
        self.sizes = graph_sizes(num_slots)
        self._padding = num_slots  # the tables' last line
        self._host_slots = np.full(num_slots, self._padding, np.int32)
        self._slots = platform.upload(self._host_slots)
        self._input_ids, self._context_lens, self._order = torch.zeros(
            3, num_slots, dtype=torch.int32, device=platform.device
        )
        self._positions, self._kv_slots = torch.zeros(
            2, num_slots, dtype=torch.int64, device=platform.device
        )
        self._kv = [cache.k for cache in eager.caches], [cache.v for cache in eager.caches]
        step = eager.model.step
        is_whole = step is not None and step.suits(*self._kv)
        self.max_whole_context = step.max_context if step is not None and is_whole else 0
        self._graphs: dict[int, StepGraphs] = {}
        buffers = eager.buffers
        self._shared = SharedPrefixes(
            platform, num_slots, buffers.block_table.shape[1], buffers.block_size
        )

    def capture(self, show_progress: bool) -> None:
        """Record every size, those with the most logits first: the others use their memory."""
        captures = [partial(self._capture, size) for size in self.sizes[::-1]]
        if self.chunks is not None:
            captures += [partial(self.chunks.capture, size) for size in self.chunks.sizes[::-1]]
        for capture in tqdm(captures, "Capturing graphs", disable=not show_progress, leave=False):
            capture()

    def __call__(self, plan: StepPlan) -> StepLogits:
        self._shared.enter(plan.new_rows)
        if not is_decode(plan):
            step = None if self.chunks is None else self.chunks(plan)
            return self.eager(plan) if step is None else step
        num_rows = len(plan.slots)
        self._send_slots(plan.slots)
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        graphs = self._graphs[size]
        if graphs.run_whole is not None and plan.starts[0] < self.max_whole_context:
            graphs.run_whole()
        elif graphs.run_shared is not None and self._shared.find(plan.slots):
            graphs.run_shared()
        else:
            graphs.run_model()
        return self._step_logits(graphs.logits, num_rows, size)

    def sample(self, logits: StepLogits, plan: StepPlan) -> Tensor:
        if logits.graph_size is None:
            return self.sampler(logits, plan)
        variant = self.sampler.buffers.sampling_variant(plan)
        replay, tokens = self._graphs[logits.graph_size].samplers[variant]
        replay()
        # The copy to the host is queued behind this replay and before the next: nothing is lost.
        return tokens[: len(plan.slots)]

    def _capture(self, size: int) -> None:
        run_model, logits = self.platform.record(partial(self._run_model, size))
        step = self._step_logits(logits, size, size)
        samplers = {
            variant: self.platform.record(partial(self.sampler.sample, step, variant))
            for variant in VARIANTS
        }
        run_whole = run_shared = None
        if size == 1 and self.max_whole_context > 0:
            run_whole, _ = self.platform.record(partial(self._run_whole, logits))
        if size >= MIN_ROWS and isinstance(self.attention, TritonAttention):
            run_shared, _ = self.platform.record(partial(self._run_shared, size, logits))
        # No two sizes' logits are wanted at a time: given up here, their memory serves the next.
        logits = self.platform.borrow(logits)
        self._graphs[size] = StepGraphs(run_model, run_whole, run_shared, logits, samplers)

    def _step_logits(self, logits: Tensor, num_rows: int, size: int) -> StepLogits:
        return StepLogits(
            logits[:num_rows], self._slots[:num_rows], self._context_lens[:num_rows], size
        )

    def _send_slots(self, slots: np.ndarray) -> None:
        """Tell the device which slots run, if that changed."""
        host = np.full_like(self._host_slots, self._padding)
        host[: len(slots)] = slots
        if not np.array_equal(host, self._host_slots):
            self.platform.send(host, self._slots)
            self._host_slots = host

    def _run_shared(self, size: int, logits: Tensor) -> Tensor:
        return logits.copy_(self._run_model(size, self._shared.rows(size)))

    def _run_model(self, size: int, shared: SharedRows | None = None) -> Tensor:
        eager, buffers = self.eager, self.eager.buffers
        slots, context_lens, order = (
            column[:size] for column in (self._slots, self._context_lens, self._order)
        )
        inputs = self._input_ids[:size], self._positions[:size], self._kv_slots[:size]
        gather_decode(
            slots,
            buffers.lengths,
            buffers.tokens,
            buffers.block_table,
            buffers.block_size,
            *inputs,
            context_lens,
            order,
        )
        rows = DecodeRows(
            buffers.block_table, slots, context_lens, order, self.max_model_len, shared
        )
        plan = self.attention.decode_plan(rows)
        return eager.model(ForwardBatch(*inputs, None, plan, eager.caches))

    def _run_whole(self, logits: Tensor) -> Tensor:
        """Run the one row as one kernel, which reads the tables itself."""
        step, buffers = self.eager.model.step, self.eager.buffers
        assert step is not None
        tables = buffers.lengths, buffers.tokens, buffers.block_table
        step.run(self._slots[:1], *tables, *self._kv, logits, self._context_lens[:1])
        return logits
