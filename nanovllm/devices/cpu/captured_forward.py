"""Small decode steps on the CPU as one captured program, with no Python between the kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from nanovllm.devices.cpu.numba_attention import NumbaPlan
from nanovllm.devices.cpu.ops import NumbaOps
from nanovllm.devices.cpu.program import NotCapturableError
from nanovllm.engine.step import StepPlan
from nanovllm.layers.build import ForwardBatch
from nanovllm.worker.forward import EagerForward, StepLogits, is_decode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    batch: ForwardBatch  # what the program reads
    replay: Callable[[], None]
    logits: Tensor  # what it writes


class CapturedForward:
    """Replays decode steps whose products are all kernels of ours; the model runs the others."""

    def __init__(self, eager: EagerForward, ops: NumbaOps, max_model_len: int) -> None:
        self.eager = eager
        self.launcher = ops.launcher
        self.max_model_len = max_model_len
        self.max_rows = ops.max_linear_rows
        self._steps: dict[int, RecordedStep] = {}  # by number of rows

    def __call__(self, plan: StepPlan) -> StepLogits:
        num_rows = len(plan.slots)
        if num_rows > self.max_rows or not is_decode(plan):
            return self.eager(plan)
        batch = self.eager.batch(plan)
        step = self._steps.get(num_rows) or self._try_to_record(batch)
        if step is None:
            return self.eager(plan)
        _copy(batch, step.batch)
        step.replay()
        return self.eager.step_logits(step.logits, plan)

    def prepare(self) -> None:
        """Record the step of one row now, so that no token of the first answer waits for it."""
        self._try_to_record(self.eager.batch(one_row()))

    def _try_to_record(self, batch: ForwardBatch) -> RecordedStep | None:
        try:
            step = self._record(batch)
        except NotCapturableError as error:
            logger.warning("Decode steps run eagerly, which is slower: %s", error)
            self.max_rows = 0
            return None
        self._steps[len(batch.input_ids)] = step
        return step

    def _record(self, batch: ForwardBatch) -> RecordedStep:
        plan = batch.attention
        static = replace(
            batch,
            input_ids=batch.input_ids.clone(),
            positions=batch.positions.clone(),
            slot_mapping=batch.slot_mapping.clone(),
            attention=NumbaPlan(
                plan.tokens.clone(),
                plan.lengths.clone(),
                plan.block_tables.clone(),
                self.max_model_len,
                [],
            ),
        )
        program, logits = self.launcher.capture(lambda: self.eager.model(static))
        return RecordedStep(static, program.run, logits)


def one_row() -> StepPlan:
    """A decode step before there are sequences; it launches every kernel that steps have."""
    one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
    return StepPlan(none, none, one, one, [], [], [], num_decode_tokens=1)


def _copy(source: ForwardBatch, target: ForwardBatch) -> None:
    target.input_ids.copy_(source.input_ids)
    target.positions.copy_(source.positions)
    target.slot_mapping.copy_(source.slot_mapping)
    target.attention.lengths.copy_(source.attention.lengths)
    target.attention.block_tables.copy_(source.attention.block_tables)
