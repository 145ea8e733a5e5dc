"""Decode steps on CUDA: one graph per batch size, which reads all it needs from the tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention.triton_paged import DecodeRows, TritonPlan
from nanovllm.engine.step import StepPlan
from nanovllm.kernels.fused import gather_decode
from nanovllm.layers.build import ForwardBatch
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.forward import EagerForward, StepLogits, is_decode


@dataclass(frozen=True, slots=True)
class Graph:
    replay: Callable[[], None]
    logits: Tensor  # [batch size, vocab_size]


class GraphedForward:
    """Replays decode steps; the model runs the others."""

    def __init__(self, eager: EagerForward, platform: CudaPlatform, max_model_len: int) -> None:
        self.eager = eager
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
        self._graphs: dict[int, Graph] = {}

    def capture(self, show_progress: bool) -> None:
        """Record every batch size, the largest first: the others work in its memory."""
        sizes = tqdm(self.sizes[::-1], "Capturing graphs", disable=not show_progress, leave=False)
        for size in sizes:
            replay, logits = self.platform.record(partial(self._run, size))
            self._graphs[size] = Graph(replay, logits)

    def __call__(self, plan: StepPlan) -> StepLogits:
        if not is_decode(plan):
            return self.eager(plan)
        num_rows = len(plan.slots)
        self._send_slots(plan.slots)
        graph = self._graphs[next(size for size in self.sizes if size >= num_rows)]
        graph.replay()
        return StepLogits(
            graph.logits[:num_rows], self._slots[:num_rows], self._context_lens[:num_rows]
        )

    def _send_slots(self, slots: np.ndarray) -> None:
        """Tell the device which slots run, if that changed."""
        host = np.full_like(self._host_slots, self._padding)
        host[: len(slots)] = slots
        if not np.array_equal(host, self._host_slots):
            # Noted last: after an interrupt in between, the slots are sent again.
            self._slots.copy_(self.platform.upload(host))
            self._host_slots = host

    def _run(self, size: int) -> Tensor:
        eager, buffers = self.eager, self.eager.buffers
        slots, context_lens = self._slots[:size], self._context_lens[:size]
        inputs = self._input_ids[:size], self._positions[:size], self._kv_slots[:size]
        gather_decode(
            slots,
            buffers.lengths,
            buffers.tokens,
            buffers.block_table,
            buffers.block_size,
            *inputs,
            context_lens,
            self._order[:size],
        )
        rows = DecodeRows(slots, context_lens, None, self._order[:size], self.max_model_len)
        plan = TritonPlan(buffers.block_table, rows, None)
        input_ids, positions, kv_slots = inputs
        return eager.model(ForwardBatch(input_ids, positions, kv_slots, None, plan, eager.caches))


def graph_sizes(max_rows: int) -> list[int]:
    """Every size up to 16, then steps that waste an eighth or so at most; always max_rows."""
    sizes = [*range(1, 17), *range(24, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return [*(size for size in sizes if size < max_rows), max_rows]
