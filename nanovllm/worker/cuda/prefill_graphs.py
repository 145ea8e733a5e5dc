"""Steps with prompts in them, on CUDA: one graph per number of tokens, padded up to it.

Launching a layer's kernels one by one takes the host longer than a few thousand tokens take the
device, so the first token of a short prompt, and every answer that runs beside it, would wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.attention.base import DecodeRows
from nanovllm.attention.triton import TritonAttention
from nanovllm.engine.step import StepPlan
from nanovllm.layers.build import ForwardBatch, SampledTokens
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.batch import look_up, tokens_of
from nanovllm.worker.forward import EagerForward, StepLogits

MAX_TOKENS = 4096  # more keep the device busy for longer than the host takes
MAX_ROWS = 256  # each one's logits are computed, used or not
MAX_PROMPTS = 16  # rows of more than one token


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """What a graph has room for."""

    num_tokens: int
    num_rows: int

    def fits(self, plan: StepPlan) -> bool:
        has_room = plan.counts.sum() <= self.num_tokens and len(plan.slots) <= self.num_rows
        return bool(has_room and (plan.counts > 1).sum() <= MAX_PROMPTS)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the columns: two per token, three per single token, four per prompt, three sampled."""
        return 2 * self.num_tokens, 3 * self.num_rows, 4 * MAX_PROMPTS, 3 * self.num_rows


def chunk_sizes(max_tokens: int, max_rows: int) -> list[ChunkSize]:
    """Powers of two and the middle between them, up to one that holds the largest step."""
    sizes, num_tokens = [], 16
    while num_tokens <= MAX_TOKENS:
        sizes.append(ChunkSize(num_tokens, min(max_rows, max(16, num_tokens // 4), MAX_ROWS)))
        if num_tokens >= max_tokens:
            break
        num_tokens += (1 << num_tokens.bit_length()) // 4
    return sizes


class GraphedChunks:
    """Replays steps that fit a size."""

    def __init__(
        self,
        eager: EagerForward,
        attention: TritonAttention,
        platform: CudaPlatform,
        max_tokens: int,
        max_model_len: int,
    ) -> None:
        self.eager = eager
        self.attention = attention
        self.platform = platform
        self.max_model_len = max_model_len
        self.num_slots = eager.tables.num_slots
        self.sizes = chunk_sizes(max_tokens, self.num_slots)
        longest = max(sum(size.lengths) for size in self.sizes)
        self._columns = torch.zeros(longest, dtype=torch.int32, device=platform.device)
        self._graphs: dict[ChunkSize, tuple[Callable[[], None], Tensor]] = {}

    def run_every_size(self) -> None:
        for size in self.sizes:
            self._run_model(size)

    def graph(self, size: ChunkSize) -> tuple[Callable[[], None], Tensor]:
        """Return the graph of a size and its logits; it is recorded when it is first asked for.

        Recording runs what the columns say: a step, which may run twice, or, before any sequence is
        there, zeros, which harm none.
        """
        if size not in self._graphs:
            replay, logits = self.platform.record(partial(self._run_model, size))
            self._graphs[size] = replay, self.platform.borrow(logits)
        return self._graphs[size]

    def __call__(self, plan: StepPlan) -> StepLogits | None:
        """Run a step, or return None if it is too large."""
        size = next((size for size in self.sizes if size.fits(plan)), None)
        if size is None:
            return None
        columns = chunk_columns(size, plan, self.num_slots)
        self._columns[: len(columns)].copy_(self.platform.upload(columns))
        replay, logits = self.graph(size)
        replay()
        return self.eager.step_logits(logits[: int((plan.num_logits > 0).sum())], plan)

    def _run_model(self, size: ChunkSize) -> Tensor:
        eager, tables = self.eager, self.eager.tables
        parts = self._columns[: sum(size.lengths)].split(size.lengths)
        slots, positions = parts[0].long().view(2, -1)
        input_ids, cache_offsets = look_up(tables, slots, positions)
        table, max_context = tables.block_table, self.max_model_len
        plan = self.attention.chunk_plan(
            table, parts[1].view(3, -1), parts[2].view(4, -1), max_context, size.num_tokens
        )
        sampled_slots, index, context_lens = parts[3].view(3, -1)
        last = self.attention.decode_plan(
            DecodeRows(table, sampled_slots, context_lens, None, max_context)
        )
        cache_offsets = torch.where(slots == self.num_slots, -1, cache_offsets)
        sampled = SampledTokens(index.long(), last)
        batch = ForwardBatch(input_ids, positions, cache_offsets, sampled, plan, eager.caches)
        return eager.model(batch)


def chunk_columns(size: ChunkSize, plan: StepPlan, padding: int) -> npt.NDArray[np.int32]:
    """Lay a plan out as `ChunkSize.lengths` says; padding is the slot that no sequence has.

    Single rows that are padding write zeros to a prompt's token, before its own attention does, or
    to the last one: without prompts there are as many tokens as rows, so it is padding too.
    """
    token_slots, positions = tokens_of(plan)
    ends = np.cumsum(plan.counts)
    columns = np.stack((plan.slots, ends - plan.counts, plan.counts, plan.starts + plan.counts))
    is_single = plan.counts == 1
    tokens = np.zeros((2, size.num_tokens), np.int32)
    singles = np.zeros((3, size.num_rows), np.int32)  # slot, token, context
    prompts = np.zeros((4, MAX_PROMPTS), np.int32)  # slot, first token, tokens, context
    sampled = np.zeros((3, size.num_rows), np.int32)  # slot, token, context
    tokens[0] = singles[0] = sampled[0] = padding
    singles[1] = size.num_tokens - 1 if is_single.all() else columns[1, ~is_single][0]
    tokens[:, : len(token_slots)] = token_slots, positions
    singles[:, : is_single.sum()] = columns[[0, 1, 3]][:, is_single]
    prompts[:, : (~is_single).sum()] = columns[:, ~is_single]
    is_sampled = plan.num_logits > 0
    last = np.stack((plan.slots, ends - 1, columns[3]))
    sampled[:, : is_sampled.sum()] = last[:, is_sampled]
    return np.concatenate([part.ravel() for part in (tokens, singles, prompts, sampled)])
