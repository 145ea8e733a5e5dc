"""How steps run on CUDA, each the first way that suits it.

| the step has                | ways to run the model, in this order                             |
|-----------------------------|------------------------------------------------------------------|
| one new token in every row  | persistent kernel, graph for shared prefixes, decode graph        |
| prompts                     | prefill graph, eager                                              |

| the model ran as            | ways to sample                                                    |
|-----------------------------|------------------------------------------------------------------|
| persistent or decode graph  | sampler graph, with or without a bitmask, or launched kernels     |
| anything else               | launched kernels                                                  |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nanovllm.devices.cuda.decode_graphs import DecodeGraphs
from nanovllm.devices.cuda.prefill_graphs import PrefillGraphs
from nanovllm.devices.cuda.sampler import GraphKey, SamplerGraphs
from nanovllm.engine.step import IntColumn, StepPlan
from nanovllm.kernels.cuda.logprobs import token_logprobs
from nanovllm.kernels.cuda.masks import keep_allowed, keep_allowed_in_slots
from nanovllm.kernels.ops import Sampling
from nanovllm.worker.batch import is_decode
from nanovllm.worker.forward import EagerForward, Sampled, StepLogits

if TYPE_CHECKING:
    from nanovllm.devices.cuda.device import CudaDevice

logger = logging.getLogger(__name__)

Way = Callable[[StepPlan], StepLogits | None]  # None: it does not suit the step


class CudaSteps:
    """Graphs are captured before the first request if `captures_ahead`, else on first use."""

    def __init__(
        self,
        eager: EagerForward,
        device: CudaDevice,
        decode: DecodeGraphs,
        prefill: PrefillGraphs | None,
        samplers: SamplerGraphs,
        captures_ahead: bool,
    ) -> None:
        self.eager, self.device, self.captures_ahead = eager, device, captures_ahead
        self.decode, self.prefill, self.samplers = decode, prefill, samplers
        self.decode_ways: tuple[Way, ...] = (
            decode.run_persistent,
            decode.run_shared,
            decode.run_layers,
        )
        self.prompt_ways: tuple[Way, ...] = (eager,) if prefill is None else (prefill, eager)

    def __call__(self, plan: StepPlan) -> StepLogits:
        if is_decode(plan):
            self.eager.tables.update(plan)
            self.note(plan)
            return _first(self.decode_ways, plan)
        logits = _first(self.prompt_ways, plan)
        self.note(plan)  # last: the device has work meanwhile
        return logits

    def sample(self, logits: StepLogits, plan: StepPlan) -> Sampled:
        return self._replay_sampler(logits, plan, None) or self.samplers.sampler(logits, plan)

    def replay_masked(self, logits: StepLogits, plan: StepPlan, masks: IntColumn) -> Sampled | None:
        """Sample what masks allow by one graph; None, and nothing done, if there is none for it."""
        return self._replay_sampler(logits, plan, masks)

    def _replay_sampler(
        self, logits: StepLogits, plan: StepPlan, masks: IntColumn | None
    ) -> Sampled | None:
        key, is_masked = logits.graph, masks is not None
        sampling = None if key is None else self.samplers.find(key, plan, masks)
        if key is None or sampling is None:
            return None
        if not self.samplers.has(key, sampling, is_masked):
            self._capture_sampler(key, sampling, is_masked)
        return self.samplers.replay(key, sampling, is_masked, len(plan.slots))

    def note(self, plan: StepPlan) -> None:
        """Learn which sequences enter with a plan, also with one that runs elsewhere."""
        self.decode.prefixes.enter(plan.new_rows)

    def has_lost_step(self) -> bool:
        """Whether the persistent kernel gave up; it is not used again then."""
        persistent = self.decode.persistent
        if persistent is None or not persistent.gave_up():
            return False
        logger.warning(
            "A decode step gave up waiting for the rest of the device: its sequences are "
            "recomputed, and sequences alone run layer by layer from now on"
        )
        self.decode.max_persistent_context = 0
        return True

    def run_every_size(self) -> None:
        """Launch every kernel that a step may have."""
        self.decode.run_every_size(self._run_samplers)
        if self.prefill is not None:
            self.prefill.run_every_size()

    def capture_all(self) -> None:
        """Capture every graph that plain requests replay, the largest first: all share its memory.

        `capture_one` adds those for bitmasks and shared prefixes while the engine is idle. Ranks of
        a group have no such moment in common, so theirs are captured here.
        """
        for key in self.decode.all_keys():
            self.decode.graph(key)
            for _, sampling in self.samplers.missing([key], is_masked=False):
                self._capture_sampler(key, sampling, is_masked=False)
        if self.prefill is not None:
            for chunk_size in reversed(self.prefill.sizes):
                self.prefill.graph(chunk_size, is_loaded=True)
        while not self.device.group.is_alone and self.capture_one():
            pass

    def capture_first(self) -> None:
        """Capture the graphs that are used most; others follow when a step first needs them."""
        for key in self.decode.first_keys():
            self.decode.graph(key)
        if self.prefill is not None:
            self.prefill.graph(self.prefill.sizes[-1])

    def capture_one(self) -> bool:
        """Capture one of the graphs that few requests replay; False if none is left to capture."""
        if not self.captures_ahead:
            return False
        if self.decode.capture_one_shared():
            return True
        missing = self.samplers.missing(list(self.decode.graphs), is_masked=True)
        for key, sampling in missing[:1]:
            self._capture_sampler(key, sampling, is_masked=True)
        return bool(missing)

    def _capture_sampler(self, key: GraphKey, sampling: Sampling, is_masked: bool) -> None:
        with self.decode.padded():  # sampling would advance sequences
            self.samplers.capture(key, self.decode.whole_step(key), sampling, is_masked)

    def _run_samplers(self, step: StepLogits) -> None:
        logits, padding = step.values, self.decode.padding
        if len(logits) == self.decode.sizes[-1]:
            shape = len(logits), -(-logits.shape[1] // 32)
            masks = self.device.readable(self.device.host_memory(shape))
            keep_allowed(logits, None, masks)  # as after a step with prompts
            keep_allowed_in_slots(logits, masks, step.slots, padding)
            token_logprobs(logits, torch.zeros_like(step.slots), 1)
        self.samplers.run_all(step)


def _first(ways: tuple[Way, ...], plan: StepPlan) -> StepLogits:
    return next(logits for way in ways if (logits := way(plan)) is not None)
