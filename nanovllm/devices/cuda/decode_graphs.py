"""CUDA graphs of decode steps for each batch-size bucket; they read inputs from the InputBatch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import DecodeRows, GraphedAttention, SharedRows
from nanovllm.devices.cuda.graph_pool import Graph
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

FIRST_SIZES = 8, 4, 2, 1  # batch sizes that `capture_first` captures, after the largest
# These batch sizes have a second graph for short contexts, whose attention need not split keys.
SHORT_SIZES = range(24, 81)

DecodeBucket = tuple[int, int]  # (batch size, maximum context length)
# How a graph runs a step: as one kernel, with shared prefixes, or just layer by layer. A bucket's
# persistent graph overwrites the logits of the graph for layers.
Way = Literal["persistent", "shared", "layers"]


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


class DecodeGraphs:
    """Captures the graphs of each bucket on first use, and replays them."""

    def __init__(self, eager: EagerForward, device: CudaDevice) -> None:
        attention, persistent = eager.attention, device.persistent
        assert isinstance(attention, GraphedAttention)
        self.eager, self.attention, self.device = eager, attention, device
        self.input_batch = input_batch = eager.input_batch
        num_slots = input_batch.num_slots
        num_groups, max_blocks = input_batch.block_tables.shape[1:]
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
        self.graphs: dict[tuple[Way, DecodeBucket], Graph] = {}
        layers = zip(eager.caches, eager.model.config.layers, strict=True)
        full_groups = [
            cache.group
            for cache, layer in layers
            if isinstance(cache, LayerCache) and layer.window is None
        ]
        # Models with recurrent layers read fewer keys, so sharing them would save less.
        can_share = isinstance(attention, TritonAttention) and eager.state_cache is None
        can_share = can_share and bool(full_groups)
        self.shared_sizes = [size for size in self.sizes if can_share and size >= MIN_ROWS]
        sizes = num_slots, max_blocks, input_batch.block_size
        self.prefixes = SharedPrefixes(device, *sizes, layer_group=min(full_groups, default=0))

    # Ways to run a step; the first two return None if they do not support the plan.

    def run_persistent(self, plan: StepPlan) -> StepLogits | None:
        """Run a small batch of short contexts as one kernel, padded to a supported batch size."""
        size = next((size for size in self.persistent_tokens if size >= len(plan.slots)), None)
        if size is None or plan.starts.sum() >= self.persistent_tokens[size]:
            return None
        return self._replay(plan, "persistent", (size, self.max_context))

    def run_shared(self, plan: StepPlan) -> StepLogits | None:
        """Run rows with shared prefixes, whose keys are read once per group (cascade attention)."""
        if len(plan.slots) < MIN_ROWS or not self.shared_sizes or has_drafts(plan):
            return None
        bucket = self.sizes[bisect_left(self.sizes, len(plan.slots))], self.max_context
        is_captured = ("shared", bucket) in self.graphs or not self.device.config.optimizes_latency
        if not is_captured or not self.prefixes.find(plan.slots):
            return None
        return self._replay(plan, "shared", bucket)

    def run_layers(self, plan: StepPlan) -> StepLogits:
        return self._replay(plan, "layers", self.bucket(plan))

    def _replay(self, plan: StepPlan, way: Way, bucket: DecodeBucket) -> StepLogits:
        graph = self.graph(way, bucket)
        self.send_slots(plan.slots)
        graph.replay()
        # Logits from graphs for shared prefixes have no sampler graphs.
        logits = graph.output[: len(plan.slots)]
        return self._step_logits(logits, None if way == "shared" else bucket)

    # Warm-up and capture.

    def warm_up(self) -> Iterator[StepLogits]:
        """Launch the kernels of every bucket, and yield the logits of each bucket.

        The largest bucket comes first, since all buckets share its memory.
        """
        for size in reversed(self.sizes):
            for max_context in {self.max_context, self.bound_of(size, 1)}:
                logits = self._run_layers(size, max_context)
            yield self._step_logits(logits, None)
            if size in self.persistent_tokens:
                self._run_persistent(logits)
            if size in self.shared_sizes:
                self._run_layers(size, self.max_context, self.prefixes.rows(size))

    def first_buckets(self) -> list[DecodeBucket]:
        """Return the largest bucket, whose memory all share, and the most used ones."""
        sizes = self.sizes[-1], *FIRST_SIZES
        return [(size, self.max_context) for size in sizes if size in self.sizes]

    def all_buckets(self) -> list[DecodeBucket]:
        """Return all buckets, the largest first."""
        return [
            (size, max_context)
            for size in reversed(self.sizes)
            for max_context in dict.fromkeys((self.max_context, self.bound_of(size, 1)))
        ]

    def capture(self, bucket: DecodeBucket) -> None:
        """Capture the graphs of a bucket, except for the one for shared prefixes."""
        self.graph("layers", bucket)
        if bucket[0] in self.persistent_tokens:
            self.graph("persistent", bucket)

    def capture_shared(self) -> Iterator[bool]:
        """Capture the graphs for shared prefixes that do not exist yet; yield True after each."""
        for size in self.shared_sizes:
            if ("shared", (size, self.max_context)) not in self.graphs:
                self.prefixes.clear()
                self.graph("shared", (size, self.max_context))
                yield True

    def graph(self, way: Way, bucket: DecodeBucket) -> Graph:
        """Return a graph; capture it on first use.

        A capture may run the step. So all rows are padding meanwhile: the last step's rows could
        write to freed blocks, and a second run would update recurrent states twice.
        """
        key = way, bucket
        if key not in self.graphs:
            run = self._to_capture(way, bucket)
            with self.padded():
                self.graphs[key] = self.device.graph_pool.capture(run)
        return self.graphs[key]

    def _to_capture(self, way: Way, bucket: DecodeBucket) -> Callable[[], Tensor]:
        if way == "persistent":
            return partial(self._run_persistent, self.graph("layers", bucket).output)
        shared = self.prefixes.rows(bucket[0]) if way == "shared" else None
        return partial(self._run_layers, *bucket, shared)

    def whole_step(self, bucket: DecodeBucket) -> StepLogits:
        """Return the logits of all rows of a bucket, including padding."""
        return self._step_logits(self.graph("layers", bucket).output, bucket)

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Make all rows padding inside the `with` block."""
        slots = self._host_slots
        self.send_slots(slots[:0])
        yield
        self.send_slots(slots)

    def bucket(self, plan: StepPlan) -> DecodeBucket:
        sizes = self.draft_sizes if has_drafts(plan) else self.sizes
        size = sizes[bisect_left(sizes, len(plan.slots))]
        return size, self.bound_of(size, int(plan.starts.max()) + 1)

    def bound_of(self, size: int, longest: int) -> int:
        """Return the maximum context of the graph for `size` rows of up to `longest` tokens."""
        is_short = size in SHORT_SIZES and longest <= SHORT_CONTEXT
        return min(SHORT_CONTEXT, self.max_context) if is_short else self.max_context

    def _step_logits(self, logits: Tensor, bucket: DecodeBucket | None) -> StepLogits:
        rows = slice(len(logits))
        return StepLogits(logits, self._slots[rows], self._context_lens[rows], bucket)

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
        where = input_batch.rope_offsets, input_batch.block_size
        gather_decode(slots, *state, *where, (*inputs, context_lens, order))
        decode = DecodeRows(
            input_batch.block_tables, slots, context_lens, order, max_context, shared
        )
        plan = self.attention.decode_plan(decode)
        recurrent = None if eager.state_cache is None else RecurrentRows(slots.long())
        return eager.model(ForwardBatch(*inputs, None, plan, eager.caches, recurrent))

    def _run_persistent(self, logits: Tensor) -> Tensor:
        """Run the step as one kernel, which reads the InputBatch itself."""
        assert self.persistent is not None
        input_batch, rows = self.input_batch, slice(len(logits))
        block_table = input_batch.block_tables[:, self.caches[0].group]  # all layers share a group
        state = input_batch.lengths, input_batch.tokens, block_table
        outputs = logits, self._context_lens[rows]
        verifies = self.device.config.num_speculative_tokens > 0 and len(logits) > 1
        self.persistent.run(self._slots[rows], *state, self.caches, *outputs, verifies)
        return logits
