"""Sampling on CUDA without the host: kernels read the parameters by slot and advance the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.distributed.group import TPGroup
from nanovllm.engine.step import IntColumn, StepPlan
from nanovllm.kernels.cuda.masks import keep_allowed_in_slots
from nanovllm.kernels.cuda.sampling import advance, sample_tokens, sampling_workspace
from nanovllm.kernels.ops import Sampling
from nanovllm.worker.forward import Sampled, StepLogits
from nanovllm.worker.tables import SlotTables

if TYPE_CHECKING:
    from nanovllm.devices.cuda.device import CudaDevice

# What is captured, the simplest first; a batch is served by the first that has all it asks for.
CAPTURED_SAMPLING = (
    Sampling.GREEDY,
    Sampling.NOISE,
    Sampling.NOISE | Sampling.MIN_P,
    Sampling.NOISE | Sampling.MIN_P | Sampling.TOP,
)

GraphKey = tuple[int, int]  # of a decode graph: its rows, its longest context
Replays = Iterator[tuple[Callable[[], None], Tensor]]


class TritonSampler:
    def __init__(self, tables: SlotTables, vocab_size: int, group: TPGroup) -> None:
        self.tables = tables
        self.group = group
        device = tables.device.torch_device
        self._workspace = sampling_workspace(tables.num_slots, vocab_size, device)

    def __call__(self, logits: StepLogits, plan: StepPlan) -> Sampled:
        return Sampled(self.sample(logits, self.tables.sampling(plan)))

    def sample(
        self,
        logits: StepLogits,
        asked: Sampling,
        out: Tensor | None = None,
        host: Tensor | None = None,
    ) -> Tensor:
        """Return tokens; `host`, only for a worker alone, gets them as well."""
        if out is None:
            out = torch.empty(len(logits.values), dtype=torch.int32, device=logits.values.device)
        state = self.tables.tokens, self.tables.lengths
        if self.group.rank == 0:
            sample_tokens(
                logits.values,
                logits.slots,
                self.tables.sampling_columns,
                logits.positions,
                asked,
                out,
                self._workspace,
                *((*state, host) if self.group.is_alone else ()),
            )
        if not self.group.is_alone:
            self.group.broadcast(out)
            advance(out, logits.slots, *state)
        return out


class SamplerGraphs:
    """Graphs that sample the logits of decode graphs.

    There are two of each, which take turns and write to host memory of their own: a step begins
    before the host has read the tokens of the one before.
    """

    def __init__(self, sampler: TritonSampler, device: CudaDevice, is_loaded: bool) -> None:
        self.sampler, self.device = sampler, device
        self.is_loaded = is_loaded  # whether the kernels ran before
        num_slots = sampler.tables.num_slots
        self.padding = num_slots  # the tables' last row
        # Not in the graphs' pool: while it is copied, the next step may run.
        self._tokens = torch.zeros(num_slots, dtype=torch.int32, device=device.torch_device)
        self._masks: Tensor | None = None  # pinned host memory, read by the graphs
        self._graphs: dict[tuple[GraphKey, Sampling, bool], Replays] = {}

    def run_all(self, step: StepLogits) -> None:
        """Launch every kernel that sampling a number of rows may need."""
        host = self.device.pinned(self._tokens[: len(step.values)])
        for sampling in CAPTURED_SAMPLING:
            self.sampler.sample(step, sampling)  # as after a step with prompts
            self.sampler.sample(step, sampling, None, host)

    def missing(self, keys: list[GraphKey], is_masked: bool) -> list[tuple[GraphKey, Sampling]]:
        """Return the graphs that are not captured; those for masks need to know where these are."""
        if is_masked and self._masks is None:
            return []
        pairs = [(key, sampling) for key in keys for sampling in CAPTURED_SAMPLING]
        return [pair for pair in pairs if (*pair, is_masked) not in self._graphs]

    def find(self, key: GraphKey, plan: StepPlan, masks: IntColumn | None) -> Sampling | None:
        """Return the sampling that a graph has for a plan; None if it asks for more."""
        if masks is not None and (len(masks) < len(plan.slots) or not self._can_read(masks)):
            return None
        asked = self.sampler.tables.sampling(plan)
        sampling = next((each for each in CAPTURED_SAMPLING if asked in each), None)
        if sampling is None or masks is None or not self.is_loaded:
            return sampling
        return sampling if self.has(key, sampling, True) else None  # captured while idle

    def has(self, key: GraphKey, sampling: Sampling, is_masked: bool) -> bool:
        return (key, sampling, is_masked) in self._graphs

    def capture(self, key: GraphKey, step: StepLogits, sampling: Sampling, is_masked: bool) -> None:
        """Takes no memory of the graphs' pool, which would be that of the logits."""
        tokens = self._tokens[: len(step.values)]
        masks = self._masks if is_masked else None
        hosts = [self.device.pinned(tokens) for _ in range(2)]
        samples = [partial(self._sample, step, masks, sampling, tokens, host) for host in hosts]
        replays = [self.device.capture(sample, self.is_loaded)[0] for sample in samples]
        self._graphs[key, sampling, is_masked] = cycle(zip(replays, hosts, strict=True))

    def replay(self, key: GraphKey, sampling: Sampling, is_masked: bool, num_rows: int) -> Sampled:
        replay, host = next(self._graphs[key, sampling, is_masked])
        replay()
        is_alone = self.sampler.group.is_alone  # else another rank's tokens come after sampling
        return Sampled(self._tokens[:num_rows], host[:num_rows] if is_alone else None)

    def _can_read(self, masks: IntColumn) -> bool:
        """Whether graphs find masks there, which mostly are where they were before."""
        if self._masks is None or self._masks.data_ptr() != masks.ctypes.data:
            if not self.device.is_pinned(masks):
                return False
            self._masks = self.device.readable(masks)
            self._graphs = {key: each for key, each in self._graphs.items() if not key[2]}
        return True

    def _sample(
        self,
        step: StepLogits,
        masks: Tensor | None,
        sampling: Sampling,
        tokens: Tensor,
        host: Tensor,
    ) -> Tensor:
        if masks is not None:
            keep_allowed_in_slots(step.values, masks, step.slots, self.padding)
        return self.sampler.sample(step, sampling, tokens, host)
