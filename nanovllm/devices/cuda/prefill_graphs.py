"""CUDA graphs of steps with prefill rows; a step is padded to the first bucket into which it fits.

Up to a few thousand tokens, launching a layer's kernels one by one takes the host longer than the
device needs to run them. Without graphs, this would delay the first token of short prompts, and all
decode rows of the step.
"""

from __future__ import annotations

import operator
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.attention.backend import DecodeRows
from nanovllm.config import ModelConfig
from nanovllm.devices.cuda.graph_pool import Graph
from nanovllm.devices.cuda.kernels.pdl import MAX_ROWS as OVERLAP_ROWS
from nanovllm.devices.cuda.kernels.step_inputs import gather_tokens, write_words
from nanovllm.devices.cuda.triton_attention import TritonAttention
from nanovllm.engine.step import StepPlan
from nanovllm.layers.build import ForwardBatch, SampledTokens
from nanovllm.ops.interface import RecurrentRows
from nanovllm.ops.torch_delta_net import CHUNK_SIZE, split_chunks
from nanovllm.worker.forward import EagerForward, StepLogits

if TYPE_CHECKING:
    from nanovllm.devices.cuda.device import CudaDevice

# Maximum tokens, except in buckets for many prompts: with more, kernels take longer than launches.
MAX_TOKENS = 4096
MAX_ROWS = 256  # maximum rows: a graph computes the logits of all rows, including padding
# Maximum prefill rows (rows of more than one token), except in buckets for many prompts.
MAX_PROMPTS = 16
# Many short prompts have their own buckets, with a small maximum length: the attention grid is
# sized as if every prompt had the maximum length, and CTAs without queries take time, too.
MANY_PROMPTS, MANY_LEN = 64, 512  # maximum prompts in such a bucket, maximum tokens per prompt
MIN_MANY_TOKENS, MAX_MANY_TOKENS = 1024, 8192  # bounds on the total tokens of such a bucket
LAYER_MACS = 3 << 36  # multiply-adds that take as long as launching the kernels of a layer
MAX_ALONE = 4  # maximum prompts in the buckets for steps without decode rows
MAX_ALONE_TOKENS = 1024  # maximum total tokens of these buckets
MAX_CHANGES = 16384  # maximum words of the InputBatch that a graph updates before its step
# Numbers of decode rows that cover all attention kernels, to warm up steps too large for a graph.
FEW_ROWS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96
# Number of int32 words per token, decode row, prompt, sampled row and chunk: see `Bucket.lengths`.
HEIGHTS = 2, 3, 4, 3, 4


class Bucket(NamedTuple):
    """The capacity of a graph, or the size of a step."""

    num_tokens: int
    num_decodes: int  # decode rows: rows of one token
    num_prompts: int  # rows of more than one token
    num_rows: int
    longest: int  # maximum tokens of one row
    # Chunks of recurrent layers (see `split_chunks`); 0 without such layers. `needed_size` leaves
    # it 0, because a bucket has room for the chunks of every step that fits in the other respects.
    num_chunks: int = 0

    def fits(self, needed: Bucket) -> bool:
        return all(map(operator.le, needed, self))

    def with_chunks(self) -> Bucket:
        return self._replace(num_chunks=max_chunks(self.num_tokens, self.num_rows))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of words in each section of a step's inputs, which `step_columns` fills."""
        widths = self.num_tokens, self.num_decodes, self.num_prompts, self.num_rows, self.num_chunks
        return tuple(height * width for height, width in zip(HEIGHTS, widths, strict=True))


def needed_size(plan: StepPlan) -> Bucket:
    num_rows, num_decodes = len(plan.counts), int((plan.counts == 1).sum())
    num_tokens, longest = int(plan.counts.sum()), int(plan.counts.max())
    return Bucket(num_tokens, num_decodes, num_rows - num_decodes, num_rows, longest)


def count_many_tokens(config: ModelConfig) -> int:
    """Return the maximum tokens of a bucket for many prompts; with more, the GPU is the bottleneck.

    Weights outside the layers, such as the LM head's, are counted as if spread over the layers.
    """
    num_weights = config.num_weights_per_token // len(config.layers)
    return min(LAYER_MACS // num_weights, MAX_MANY_TOKENS)


def bucket_sizes(max_tokens: int, max_rows: int, max_many_tokens: int) -> list[Bucket]:
    """Return the buckets for steps without decode rows, for other steps, and for many prompts.

    Token counts are powers of two and the numbers halfway between them, starting at 16.
    """
    sizes, num_tokens = [], 16
    if max_rows <= MAX_PROMPTS:
        max_many_tokens = 0
    while num_tokens <= max(MAX_TOKENS, max_many_tokens):
        if num_tokens <= MAX_ALONE_TOKENS:
            num_rows = min(max_rows, MAX_ALONE)
            sizes.append(Bucket(num_tokens, 0, num_rows, num_rows, num_tokens))
        num_rows = min(max_rows, max(16, num_tokens // 4), MAX_ROWS)
        if num_tokens <= MAX_TOKENS:
            sizes.append(Bucket(num_tokens, num_rows, MAX_PROMPTS, num_rows, num_tokens))
        if MIN_MANY_TOKENS <= num_tokens <= max_many_tokens:
            num_prompts = min(num_rows, MANY_PROMPTS)
            sizes.append(Bucket(num_tokens, num_rows, num_prompts, num_rows, MANY_LEN))
        if num_tokens >= max_tokens:
            break
        num_tokens += (1 << num_tokens.bit_length()) // 4
    return sizes


class PrefillGraphs:
    """Captures one graph per bucket, and replays it for steps that fit the bucket."""

    def __init__(
        self,
        eager: EagerForward,
        attention: TritonAttention,
        device: CudaDevice,
        sizes: list[Bucket],
    ) -> None:
        self.eager = eager
        self.attention = attention
        self.device = device
        self.num_slots = eager.input_batch.num_slots
        self.sizes = sizes
        num_words = max(sum(size.lengths) for size in self.sizes) + 1 + 2 * MAX_CHANGES
        self._columns = torch.zeros(num_words, dtype=torch.int32, device=device.torch_device)
        # `compile_ahead` runs steps without filling these buffers: zeros are valid in all of them.
        most, where = self.sizes[-1].num_tokens, device.torch_device
        self._input_ids = torch.zeros(most, dtype=torch.int32, device=where)
        # Row 0: positions; the others: slot_mapping of each group.
        num_groups = eager.input_batch.block_tables.shape[1]
        self._token_columns = torch.zeros(1 + num_groups, most, dtype=torch.int64, device=where)
        self._graphs: dict[Bucket, Graph] = {}

    def warm_up(self) -> None:
        """Launch every kernel of steps with prefill rows, even of steps too large for any graph."""
        for size in reversed(self.sizes):
            self._run_model(size)
        most = self.sizes[-1]
        for num_tokens in {min(most.num_tokens, OVERLAP_ROWS), most.num_tokens}:
            for num_rows in FEW_ROWS:
                if num_rows <= min(most.num_rows, num_tokens):
                    self._run_model(Bucket(num_tokens, num_rows, 1, num_rows, num_tokens))

    def graph(self, size: Bucket) -> Graph:
        """Return the graph of a bucket; capture it on first use.

        A capture may run the step. So all its rows are padding: a second run would update recurrent
        states twice.
        """
        if size not in self._graphs:
            none = np.zeros(0, np.int32)
            no_rows = StepPlan(none, none, none, none, [], [], [], num_decode_tokens=0)
            self._send(size, no_rows, none)
            self._graphs[size] = self.device.graph_pool.capture(partial(self._run_model, size))
        return self._graphs[size]

    def __call__(self, plan: StepPlan) -> StepLogits | None:
        """Run a step, or return None if it fits no bucket."""
        needed = needed_size(plan)
        size = next((size for size in self.sizes if size.fits(needed)), None)
        if size is None:
            return None
        changes = self.eager.input_batch.changes(plan)
        if len(changes) > MAX_CHANGES:
            self.eager.input_batch.update(plan)
            changes = changes[:0]
        replay, logits = self.graph(size)
        self._send(size, plan, changes)
        replay()
        num_sampled = int(np.count_nonzero(plan.num_logits))
        slots, _, positions = self._split(size)[3].view(3, -1)[:, :num_sampled]
        return StepLogits(logits[:num_sampled], slots, positions)

    def _send(self, size: Bucket, plan: StepPlan, changes: npt.NDArray[np.int32]) -> None:
        columns = step_columns(size, plan, self.num_slots)
        columns = np.concatenate((columns, [len(changes)], changes.ravel()), dtype=np.int32)
        self.device.send(columns, self._columns)

    def _split(self, size: Bucket) -> tuple[Tensor, ...]:
        return self._columns[: sum(size.lengths)].split(size.lengths)

    def _run_model(self, size: Bucket) -> Tensor:
        eager, input_batch, end = self.eager, self.eager.input_batch, sum(size.lengths)
        # The columns are followed by the number of changes to the InputBatch, and the changes.
        changes = self._columns[end + 1 :][: 2 * MAX_CHANGES].view(-1, 2)
        write_words(input_batch.words, changes, self._columns[end : end + 1])
        parts = self._split(size)
        slots, token_positions = parts[0].view(2, -1)
        columns = self._token_columns[:, : size.num_tokens]
        inputs = self._input_ids[: size.num_tokens], columns[0], columns[1:]
        state = input_batch.tokens, input_batch.block_tables, input_batch.rope_offsets
        gather_tokens(slots, token_positions, *state, input_batch.block_size, inputs)
        plan = self.attention.chunk_plan(
            input_batch.block_tables, parts[1].view(3, -1), parts[2].view(4, -1), size.longest
        )
        sampled_slots, index, context_lens = parts[3].view(3, -1)
        last = self.attention.decode_plan(
            DecodeRows(input_batch.block_tables, sampled_slots, context_lens, None)
        )
        sampled = SampledTokens(index.long(), last)
        recurrent = None
        if eager.state_cache is not None:
            chunks = parts[4].view(-1, 4)
            recurrent = RecurrentRows(chunks[:, 0], chunks=chunks)
        return eager.model(ForwardBatch(*inputs, sampled, plan, eager.caches, recurrent))


def max_chunks(num_tokens: int, num_rows: int) -> int:
    """Return the maximum number of chunks (see `split_chunks`) of a step."""
    return (num_tokens + (CHUNK_SIZE - 1) * num_rows) // CHUNK_SIZE


def step_columns(size: Bucket, plan: StepPlan, padding: int) -> npt.NDArray[np.int32]:
    """Lay out a plan as `Bucket.lengths` describes; no sequence has the slot `padding`.

    Attention writes zeros to the output of padding decode rows. So each is assigned the first
    token of the first prompt, whose output prefill overwrites later, or, without prompts, the last
    token, which is padding too.
    """
    laid_out = np.zeros(sum(size.lengths), np.int32)
    tokens, decodes, prompts, sampled, chunks = (
        laid_out[end - length : end].reshape(height, -1)
        for length, end, height in zip(size.lengths, accumulate(size.lengths), HEIGHTS, strict=True)
    )
    chunks = chunks.reshape(-1, 4)  # row by row, as the kernels read it
    tokens[0] = decodes[0] = sampled[0] = padding
    slots, starts, counts = plan.slots, plan.starts, plan.counts
    ends = counts.cumsum()
    firsts, num_tokens = ends - counts, int(counts.sum())
    tokens[0, :num_tokens] = np.repeat(slots, counts)
    tokens[1, :num_tokens] = np.repeat(starts - firsts, counts) + np.arange(num_tokens)
    is_decode = counts == 1
    longer = np.array((slots, firsts, starts + counts, counts))[:, ~is_decode]
    prompts[:, : longer.shape[1]] = longer
    last = np.array((slots, ends - 1, starts + counts))
    if size.num_decodes:
        decodes[1] = longer[1, 0] if longer.size else size.num_tokens - 1
        decodes[:, : len(counts) - longer.shape[1]] = last[:, is_decode]
    last = last[:, plan.num_logits > 0]
    sampled[:, : last.shape[1]] = last
    if size.num_chunks:
        table = split_chunks(slots, counts)
        chunks[: len(table)] = table
    return laid_out
