"""Decode steps on CUDA: two graph replays, which read all they need from the tables."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import DecodeRows, GraphedAttention, SharedRows
from nanovllm.attention.triton import TritonAttention
from nanovllm.backends.cuda.prefill_graphs import GraphedChunks
from nanovllm.backends.cuda.sampler import TritonSampler
from nanovllm.backends.cuda.shared_prefixes import MIN_ROWS, SharedPrefixes
from nanovllm.engine.step import IntColumn, StepPlan
from nanovllm.kernels.cuda.attention_decode import SHORT_CONTEXT
from nanovllm.kernels.cuda.logprobs import token_logprobs
from nanovllm.kernels.cuda.masks import keep_allowed, keep_allowed_in_slots
from nanovllm.kernels.cuda.step_inputs import gather_decode
from nanovllm.kernels.ops import Sampling
from nanovllm.layers.build import ForwardBatch
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.batch import is_decode
from nanovllm.worker.forward import EagerForward, Sampled, StepLogits

if TYPE_CHECKING:
    from nanovllm.devices.cuda.persistent.step import PersistentStep

logger = logging.getLogger(__name__)

# What is recorded, the simplest first; a batch that asks for less is served by the first of them
# that has it all, one that asks for more by launching the sampler's kernels.
RECORDED_SAMPLING = (
    Sampling.GREEDY,
    Sampling.NOISE,
    Sampling.NOISE | Sampling.MIN_P,
    Sampling.NOISE | Sampling.MIN_P | Sampling.TOP,
)
FIRST_SIZES = 8, 4, 2, 1  # rows
# These have graphs of their own for short contexts, whose attention is not split.
SHORT_SIZES = range(24, 81)
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


def recorded_for(asked: Sampling) -> Sampling | None:
    return next((sampling for sampling in RECORDED_SAMPLING if asked in sampling), None)


# Two graphs that take turns, each with the host's memory that it writes tokens to: a step begins
# before the host has read what the one before it sampled.
Samplers = Iterator[tuple[Callable[[], None], Tensor]]


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """A decode step of one batch size; a graph's output is overwritten by the next replay."""

    run_model: Callable[[], None]
    run_whole: Callable[[], None] | None  # the same as one kernel, up to its `max_context`
    logits: Tensor  # [batch size, vocab_size]; other sizes' graphs use the same memory
    samplers: dict[tuple[Sampling, bool], Samplers]  # and by whether they read masks first


class GraphedSteps:
    """A Forward and, in `sample`, a Sampler that replay decode steps and pass on the others."""

    def __init__(
        self,
        eager: EagerForward,
        attention: GraphedAttention,
        sampler: TritonSampler,
        platform: CudaPlatform,
        chunks: GraphedChunks | None,
        captures_ahead: bool,
        persistent: PersistentStep | None = None,
    ) -> None:
        self.eager = eager
        self.captures_ahead = captures_ahead  # or when a step first needs a graph
        self.tables = eager.tables
        self.chunks = chunks
        self.attention = attention
        self.sampler = sampler
        self.platform = platform
        num_slots, max_blocks = self.tables.num_slots, self.tables.block_table.shape[1]
        self.max_context = max_blocks * self.tables.block_size
        self.sizes = graph_sizes(num_slots)
        self._padding = num_slots  # the tables' last row
        self._host_slots = np.full(num_slots, self._padding, np.int32)
        self._slots = platform.upload(self._host_slots)
        self._input_ids, self._context_lens, self._order = torch.zeros(
            3, num_slots, dtype=torch.int32, device=platform.device
        )
        # Of recorded samplers. Not of the graphs' pool: while it is copied, the next step may run.
        self._tokens = torch.zeros(num_slots, dtype=torch.int32, device=platform.device)
        self._positions, self._cache_offsets = torch.zeros(
            2, num_slots, dtype=torch.int64, device=platform.device
        )
        self.persistent = None
        if persistent is not None and persistent.suits(eager.caches):
            self.persistent = persistent
        self.max_whole_context = 0 if self.persistent is None else self.persistent.max_context
        self._graphs: dict[tuple[int, int], StepGraphs] = {}  # by size and longest context
        # The model for rows that share their first keys, and its logits.
        self._shared_graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}
        self._can_share = isinstance(attention, TritonAttention)
        self._masks: Tensor | None = None  # that graphs read, in memory of the host
        self._is_alone = sampler.group.is_alone  # else another rank's tokens come after sampling
        self._shared = SharedPrefixes(platform, num_slots, max_blocks, self.tables.block_size)

    def run_every_size(self) -> None:
        """Launch every kernel that a step may have, the largest sizes first: all share memory."""
        logits = self._run_model(self.sizes[-1], self.max_context)
        masks = self.platform.host_memory((len(logits), -(-logits.shape[1] // 32)))
        keep_allowed(logits, None, self.platform.readable(masks))  # as after a step with prompts
        keep_allowed_in_slots(logits, self.platform.readable(masks), self._slots, self._padding)
        token_logprobs(logits, self._tokens, 1)
        for size in reversed(self.sizes):
            for max_context in {self.max_context, self.bound_of(size, 1)}:
                logits = self._run_model(size, max_context)
            host = self.platform.pinned(self._tokens[:size])
            for sampling in RECORDED_SAMPLING:
                step = self._step_logits(logits, size, None)
                self.sampler.sample(step, sampling)  # as after a step with prompts
                self.sampler.sample(step, sampling, None, host)
            if self.persistent is not None and size in self.persistent.rows:
                self._run_whole(self.persistent, logits)
            if size >= MIN_ROWS and self._can_share:
                self._run_model(size, self.max_context, self._shared.rows(size))
        if self.chunks is not None:
            self.chunks.run_every_size()

    def capture_all(self) -> None:
        """Capture every graph that plain requests replay, the largest first: all share its memory.

        `capture_one` adds those for bitmasks and shared prefixes while the engine is idle. Ranks of
        a group have no such moment in common, so theirs are captured here.
        """
        for size in reversed(self.sizes):
            for max_context in dict.fromkeys((self.max_context, self.bound_of(size, 1))):
                graphs = self.graphs(size, max_context)
                for sampling in RECORDED_SAMPLING:
                    self.samplers(graphs, sampling)
        if self.chunks is not None:
            for chunk_size in reversed(self.chunks.sizes):
                self.chunks.graph(chunk_size, is_loaded=True)
        while not self._is_alone and self.capture_one():
            pass

    def capture_one(self) -> bool:
        """Capture one of the graphs that few requests replay; False if none is left to capture."""
        if not self.captures_ahead:
            return False
        self._send_slots(self._host_slots[:0])
        for size in self.sizes:
            if size >= MIN_ROWS and self._can_share and size not in self._shared_graphs:
                self._shared.clear()
                self._shared_graph(size)
                return True
        for graphs in self._graphs.values() if self._masks is not None else ():
            for sampling in RECORDED_SAMPLING:
                if (sampling, True) not in graphs.samplers:
                    self.samplers(graphs, sampling, is_masked=True)
                    return True
        return False

    def capture_first(self) -> None:
        """Record the largest sizes, whose memory the others use, and some that are used most.

        The others are recorded when a step first needs one, which then takes some 40 ms longer.
        """
        for size in (self.sizes[-1], *(size for size in FIRST_SIZES if size in self.sizes)):
            self.graphs(size, self.max_context)
        if self.chunks is not None:
            self.chunks.graph(self.chunks.sizes[-1])

    def __call__(self, plan: StepPlan) -> StepLogits:
        if not is_decode(plan):
            step = None if self.chunks is None else self.chunks(plan)
            step = step or self.eager(plan)
            self._shared.enter(plan.new_rows)  # last: the device has work meanwhile
            return step
        self.tables.update(plan)
        self._shared.enter(plan.new_rows)
        num_rows = len(plan.slots)
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        is_captured = size in self._shared_graphs or not self.captures_ahead
        can_share = num_rows >= MIN_ROWS and self._can_share and is_captured
        if can_share and self._shared.find(plan.slots):
            self._send_slots(plan.slots)
            run_shared, logits = self._shared_graph(size)
            run_shared()
            return self._step_logits(logits, num_rows, None)
        max_context = self.bound_of(size, int(plan.starts.max()) + 1)
        graphs = self.graphs(size, max_context)
        self._send_slots(plan.slots)
        run_whole = graphs.run_whole
        if run_whole is None or plan.starts.max() >= self.max_whole_context:
            graphs.run_model()
        else:
            run_whole()
        return self._step_logits(graphs.logits, num_rows, (size, max_context))

    def has_lost_step(self) -> bool:
        """Whether the persistent kernel gave up; it is not used again then."""
        if self.persistent is None or not self.persistent.gave_up():
            return False
        logger.warning(
            "A decode step gave up waiting for the rest of the device: its sequences are "
            "recomputed, and sequences alone run layer by layer from now on"
        )
        self.max_whole_context = 0
        return True

    def note(self, plan: StepPlan) -> None:
        """Learn which sequences enter with a plan that runs elsewhere."""
        self._shared.enter(plan.new_rows)

    def sample(self, logits: StepLogits, plan: StepPlan) -> Sampled:
        if logits.graph is None:
            return self.sampler(logits, plan)
        asked = self.tables.sampling(plan)
        recorded = recorded_for(asked)
        if recorded is None:
            return Sampled(self.sampler.sample(logits, asked))
        return self._replay(logits.graph, recorded, False, len(plan.slots))

    def replay_masked(self, logits: StepLogits, plan: StepPlan, masks: IntColumn) -> Sampled | None:
        """Likewise, of tokens that masks allow; None, and nothing done, if some rows have none."""
        num_rows = len(plan.slots)
        if logits.graph is None or len(masks) < num_rows:
            return None
        recorded = recorded_for(self.tables.sampling(plan))
        if recorded is None or not self._can_read(masks):
            return None
        if self.captures_ahead and (recorded, True) not in self._graphs[logits.graph].samplers:
            return None
        return self._replay(logits.graph, recorded, True, num_rows)

    def _can_read(self, masks: IntColumn) -> bool:
        """Whether graphs find masks there, which mostly are where they were before."""
        if self._masks is None or self._masks.data_ptr() != masks.ctypes.data:
            if not self.platform.is_readable(masks):
                return False
            self._masks = self.platform.readable(masks)
            for graphs in self._graphs.values():
                for sampling in RECORDED_SAMPLING:
                    graphs.samplers.pop((sampling, True), None)
        return True

    def _replay(
        self, graph: tuple[int, int], sampling: Sampling, is_masked: bool, num_rows: int
    ) -> Sampled:
        replay, host = next(self.samplers(self._graphs[graph], sampling, is_masked))
        replay()
        return Sampled(self._tokens[:num_rows], host[:num_rows] if self._is_alone else None)

    def graphs(self, size: int, max_context: int) -> StepGraphs:
        """Return the graphs of a size, which are recorded when they are first asked for."""
        key = size, max_context
        if key not in self._graphs:
            self._send_slots(self._host_slots[:0])  # a sequence that left may have lost its blocks
            self._graphs[key] = self._capture(size, max_context)
        return self._graphs[key]

    def samplers(self, graphs: StepGraphs, sampling: Sampling, is_masked: bool = False) -> Samplers:
        """Likewise. To record them takes no memory, or it would be that of the logits."""
        key = sampling, is_masked
        if key not in graphs.samplers:
            slots, size = self._host_slots, len(graphs.logits)
            self._send_slots(slots[:0])  # to sample would advance a sequence
            step, tokens = self._step_logits(graphs.logits, size, None), self._tokens[:size]
            masks = self._masks if is_masked else None
            hosts = [self.platform.pinned(tokens) for _ in range(2)]
            samples = [partial(self._sample, step, masks, sampling, tokens, each) for each in hosts]
            replays = [self._record(sample)[0] for sample in samples]
            graphs.samplers[key] = cycle(zip(replays, hosts, strict=True))
            self._send_slots(slots)
        return graphs.samplers[key]

    def _sample(
        self,
        step: StepLogits,
        masks: Tensor | None,
        sampling: Sampling,
        tokens: Tensor,
        host: Tensor,
    ) -> Tensor:
        if masks is not None:
            keep_allowed_in_slots(step.values, masks, step.slots, self._padding)
        return self.sampler.sample(step, sampling, tokens, host)

    def bound_of(self, size: int, longest: int) -> int:
        """The longest context that the graph for a batch is recorded for."""
        is_short = size in SHORT_SIZES and longest <= SHORT_CONTEXT
        return min(SHORT_CONTEXT, self.max_context) if is_short else self.max_context

    def _shared_graph(self, size: int) -> tuple[Callable[[], None], Tensor]:
        """Likewise; to run a step's model twice does no harm."""
        if size not in self._shared_graphs:
            rows = self._shared.rows(size)
            run = partial(self._run_model, size, self.max_context, rows)
            replay, logits = self._record(run)
            self._shared_graphs[size] = replay, self.platform.borrow(logits)
        return self._shared_graphs[size]

    def _capture(self, size: int, max_context: int) -> StepGraphs:
        run_model, logits = self._record(partial(self._run_model, size, max_context))
        run_whole = None
        if self.persistent is not None and size in self.persistent.rows:
            run_whole, _ = self._record(partial(self._run_whole, self.persistent, logits))
        # No two sizes' logits are wanted at a time: given up here, their memory serves the next.
        logits = self.platform.borrow(logits)
        return StepGraphs(run_model, run_whole, logits, {})

    def _record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return self.platform.record(run, is_loaded=self.captures_ahead)  # by `run_every_size`

    def _step_logits(
        self, logits: Tensor, num_rows: int, graph: tuple[int, int] | None
    ) -> StepLogits:
        return StepLogits(
            logits[:num_rows], self._slots[:num_rows], self._context_lens[:num_rows], graph
        )

    def _send_slots(self, slots: np.ndarray) -> None:
        """Tell the device which slots run, if that changed."""
        host = np.full_like(self._host_slots, self._padding)
        host[: len(slots)] = slots
        if not np.array_equal(host, self._host_slots):
            self.platform.send(host, self._slots)
            self._host_slots = host

    def _run_model(self, size: int, max_context: int, shared: SharedRows | None = None) -> Tensor:
        eager, tables = self.eager, self.tables
        slots, context_lens, order = (
            column[:size] for column in (self._slots, self._context_lens, self._order)
        )
        inputs = self._input_ids[:size], self._positions[:size], self._cache_offsets[:size]
        columns = *inputs, context_lens, order
        state = tables.lengths, tables.tokens, tables.block_table
        gather_decode(slots, *state, tables.block_size, columns)
        rows = DecodeRows(tables.block_table, slots, context_lens, order, max_context, shared)
        plan = self.attention.decode_plan(rows)
        return eager.model(ForwardBatch(*inputs, None, plan, eager.caches))

    def _run_whole(self, step: PersistentStep, logits: Tensor) -> Tensor:
        """Run the rows as one kernel, which reads the tables itself."""
        tables, rows = self.tables, slice(len(logits))
        state = tables.lengths, tables.tokens, tables.block_table
        step.run(self._slots[rows], *state, self.eager.caches, logits, self._context_lens[rows])
        return logits
