"""CUDA graphs of decode steps for each batch-size bucket; they read inputs from the InputBatch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import DecodeRows, GraphedAttention, SharedRows
from nanovllm.devices.cuda.kernels.attention_configs import SHORT_CONTEXT
from nanovllm.devices.cuda.kernels.step_inputs import gather_decode
from nanovllm.devices.cuda.persistent import warn_or_inform
from nanovllm.devices.cuda.shared_prefixes import MIN_ROWS, SharedPrefixes
from nanovllm.devices.cuda.triton_attention import TritonAttention
from nanovllm.engine.step import IntColumn, StepPlan
from nanovllm.layers.build import ForwardBatch
from nanovllm.ops.interface import LayerCache, RecurrentRows
from nanovllm.worker.forward import EagerForward, StepLogits, has_drafts

if TYPE_CHECKING:
    from nanovllm.devices.cuda.device import CudaDevice
    from nanovllm.devices.cuda.persistent.persistent_step import PersistentStep

FIRST_SIZES = 8, 4, 2, 1  # batch sizes that `capture_first` captures, after the largest
# These batch sizes have a second graph for short contexts, whose attention need not split keys.
SHORT_SIZES = range(24, 81)

Replay = Callable[[], None]
GraphKey = tuple[int, int]  # (batch size, maximum context length)


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture: 1 to 16, then increasingly sparse sizes up to max_rows.

    From 16 on, the distance from a size to the next is 1/8 of the largest power of two that is not
    greater than the size. Sizes between 208 and 256 are left out: cuBLAS is as fast for 256 rows.
    """
    sizes, size = [], 1
    while size < max_rows:
        if not 208 < size < 256:
            sizes.append(size)
        size += max(1, (1 << size.bit_length()) // 16)
    return [*sizes, max_rows]


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """The graphs of one bucket; the next replay overwrites the logits."""

    run_layers: Replay
    run_persistent: Replay | None  # the same step as one kernel
    logits: Tensor  # [batch size, vocab_size]; all buckets share this memory


class DecodeGraphs:
    """Captures the graphs of each bucket on first use, and replays them."""

    def __init__(self, eager: EagerForward, device: CudaDevice) -> None:
        attention, persistent = eager.attention, device.persistent
        assert isinstance(attention, GraphedAttention)
        self.eager, self.attention, self.device = eager, attention, device
        self.input_batch = input_batch = eager.input_batch
        num_slots, (_, num_groups, max_blocks) = (
            input_batch.num_slots,
            input_batch.block_tables.shape,
        )
        self.max_context = max_blocks * input_batch.block_size
        self.sizes = graph_sizes(num_slots)
        # With draft tokens, the number of rows varies from step to step. Padding to fewer sizes
        # means that fewer graphs are captured.
        some = {size << shift for size in (2, 3) for shift in range(20)}
        self.draft_sizes = [size for size in self.sizes if size in some or size in (1, num_slots)]
        self.padding = num_slots  # slot of padding rows: the last row of the InputBatch
        self._host_slots = np.full(num_slots, self.padding, np.int32)
        self._slots = device.upload(self._host_slots)
        self._input_ids, self._context_lens, self._order = torch.zeros(
            3, num_slots, dtype=torch.int32, device=device.torch_device
        )
        # Row 0: positions; the others: slot_mapping of each group.
        self._token_columns = torch.zeros(
            1 + num_groups, num_slots, dtype=torch.int64, device=device.torch_device
        )
        self.caches = [cache for cache in eager.caches if isinstance(cache, LayerCache)]
        if persistent is not None and not persistent.suits(self.caches):
            warn_or_inform("the KV cache has more than 8 GiB of keys per layer", is_served=True)
            persistent = None
        self.persistent = persistent
        # Batch size -> maximum total context of a persistent step; cleared after a timeout.
        rows = () if persistent is None else persistent.rows
        self.persistent_tokens = {
            size: persistent.max_tokens(size) for size in rows if persistent and size in self.sizes
        }
        self.graphs: dict[GraphKey, DecodeGraph] = {}
        self.shared_graphs: dict[int, DecodeGraph] = {}  # keyed by batch size
        # A capture in the middle of a step may run it twice, and update recurrent states twice.
        self.can_share = isinstance(attention, TritonAttention) and eager.state_cache is None
        layers = zip(eager.caches, eager.model.config.layers, strict=True)
        full_groups = [
            cache.group
            for cache, layer in layers
            if layer.window is None and isinstance(cache, LayerCache)
        ]
        sizes = num_slots, max_blocks, input_batch.block_size
        self.prefixes = SharedPrefixes(device, *sizes, next(iter(full_groups), None))

    # Ways to run a step; the first two return None if they do not support the plan.

    def run_persistent(self, plan: StepPlan) -> StepLogits | None:
        """Run a small batch of short contexts as one kernel, padded to a supported batch size."""
        size = next((size for size in self.persistent_tokens if size >= len(plan.slots)), None)
        if size is None or plan.starts.sum() >= self.persistent_tokens[size]:
            return None
        key = size, self.max_context
        replay = self.graph(key).run_persistent
        return None if replay is None else self._replay(replay, plan, key)

    def run_shared(self, plan: StepPlan) -> StepLogits | None:
        """Run rows with shared prefixes, whose keys are read once per group (cascade attention)."""
        if len(plan.slots) < MIN_ROWS or not self.can_share or has_drafts(plan):
            return None
        size = self.size_of(len(plan.slots))
        is_captured = size in self.shared_graphs or not self.device.config.optimizes_latency
        if not is_captured or not self.prefixes.find(plan.slots):
            return None
        self.send_slots(plan.slots)  # before `shared_graph`, whose capture may run the step
        graph = self.shared_graph(size)
        graph.run_layers()
        return self._step_logits(graph.logits[: len(plan.slots)], None)

    def run_layers(self, plan: StepPlan) -> StepLogits:
        key = self.key(plan)
        return self._replay(self.graph(key).run_layers, plan, key)

    def _replay(self, replay: Replay, plan: StepPlan, key: GraphKey) -> StepLogits:
        self.send_slots(plan.slots)
        replay()
        return self._step_logits(self.graphs[key].logits[: len(plan.slots)], key)

    # Warm-up and capture.

    def warm_up(self) -> Iterator[StepLogits]:
        """Launch the kernels of every bucket, and yield the logits of each bucket.

        The largest bucket comes first, since all buckets share its memory.
        """
        for size in reversed(self.sizes):
            for max_context in {self.max_context, self.bound_of(size, 1)}:
                logits = self._run_layers(size, max_context)
            yield self._step_logits(logits, None)
            if self.persistent is not None and size in self.persistent_tokens:
                self._run_persistent(self.persistent, logits)
            if size >= MIN_ROWS and self.can_share:
                self._run_layers(size, self.max_context, self.prefixes.rows(size))

    def first_keys(self) -> list[GraphKey]:
        """Return the key of the largest bucket, whose memory all share, and the most used keys."""
        sizes = self.sizes[-1], *(size for size in FIRST_SIZES if size in self.sizes)
        return [(size, self.max_context) for size in sizes]

    def all_keys(self) -> list[GraphKey]:
        bounds = [(size, (self.max_context, self.bound_of(size, 1))) for size in self.sizes[::-1]]
        return list(dict.fromkeys((size, bound) for size, both in bounds for bound in both))

    def capture_one_shared(self) -> bool:
        """Capture one graph for shared prefixes; return False if none is left to capture."""
        for size in self.sizes if self.can_share else ():
            if size >= MIN_ROWS and size not in self.shared_graphs:
                self.prefixes.clear()
                with self.padded():
                    self.shared_graph(size)
                return True
        return False

    def graph(self, key: GraphKey) -> DecodeGraph:
        if key not in self.graphs:
            # A capture may run the step. With the last step's rows, it could write to freed blocks.
            with self.padded():
                self.graphs[key] = self._capture(*key)
        return self.graphs[key]

    def shared_graph(self, size: int) -> DecodeGraph:
        """Return the shared-prefix graph of a bucket; capture it on first use.

        Capturing in the middle of a step may run it twice. That is safe: without recurrent layers,
        steps are idempotent.
        """
        if size not in self.shared_graphs:
            shared = self.prefixes.rows(size)
            self.shared_graphs[size] = self._capture(size, self.max_context, shared)
        return self.shared_graphs[size]

    def whole_step(self, key: GraphKey) -> StepLogits:
        """Return the logits of all rows of a graph, including padding."""
        return self._step_logits(self.graph(key).logits, key)

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Make all rows padding inside the `with` block."""
        slots = self._host_slots
        self.send_slots(slots[:0])
        yield
        self.send_slots(slots)

    def key(self, plan: StepPlan) -> GraphKey:
        sizes = self.draft_sizes if has_drafts(plan) else self.sizes
        size = sizes[bisect_left(sizes, len(plan.slots))]
        return size, self.bound_of(size, int(plan.starts.max()) + 1)

    def size_of(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def bound_of(self, size: int, longest: int) -> int:
        """Return the maximum context of the graph for `size` rows of up to `longest` tokens."""
        is_short = size in SHORT_SIZES and longest <= SHORT_CONTEXT
        return min(SHORT_CONTEXT, self.max_context) if is_short else self.max_context

    def _capture(
        self, size: int, max_context: int, shared: SharedRows | None = None
    ) -> DecodeGraph:
        run = partial(self._run_layers, size, max_context, shared)
        run_layers, logits = self.device.capture(run)
        run_persistent = None
        if self.persistent is not None and size in self.persistent_tokens:
            run = partial(self._run_persistent, self.persistent, logits)
            run_persistent, _ = self.device.capture(run)
        # Only one bucket's logits are in use at a time, so the next capture may reuse the memory.
        return DecodeGraph(run_layers, run_persistent, self.device.weak_ref(logits))

    def _step_logits(self, logits: Tensor, key: GraphKey | None) -> StepLogits:
        rows = slice(len(logits))
        return StepLogits(logits, self._slots[rows], self._context_lens[rows], key)

    def send_slots(self, slots: IntColumn) -> None:
        """Copy the slots of the step to the device if they changed."""
        host = np.full_like(self._host_slots, self.padding)
        host[: len(slots)] = slots
        if not np.array_equal(host, self._host_slots):
            self.device.send(host, self._slots)
            self._host_slots = host

    def _run_layers(self, size: int, max_context: int, shared: SharedRows | None = None) -> Tensor:
        eager, input_batch, rows = self.eager, self.input_batch, slice(size)
        slots, context_lens, order = self._slots[rows], self._context_lens[rows], self._order[rows]
        columns = self._token_columns[:, rows]
        inputs = self._input_ids[rows], columns[0], columns[1:]
        state = input_batch.lengths, input_batch.tokens, input_batch.block_tables
        gather_decode(slots, *state, input_batch.block_size, (*inputs, context_lens, order))
        decode = DecodeRows(
            input_batch.block_tables, slots, context_lens, order, max_context, shared
        )
        plan = self.attention.decode_plan(decode)
        recurrent = None if eager.state_cache is None else RecurrentRows(slots.long())
        return eager.model(ForwardBatch(*inputs, None, plan, eager.caches, recurrent))

    def _run_persistent(self, step: PersistentStep, logits: Tensor) -> Tensor:
        """Run the step as one kernel, which reads the InputBatch itself."""
        input_batch, rows = self.input_batch, slice(len(logits))
        block_table = input_batch.block_tables[:, self.caches[0].group]  # all layers share a group
        state = input_batch.lengths, input_batch.tokens, block_table
        outputs = logits, self._context_lens[rows]
        verifies = self.device.config.num_speculative_tokens > 0 and len(logits) > 1
        step.run(self._slots[rows], *state, self.caches, *outputs, verifies)
        return logits
