"""Run small decode steps as captured programs, without Python between the kernels."""

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
from nanovllm.ops.interface import RecurrentRows
from nanovllm.worker.forward import EagerForward, StepLogits, is_decode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    batch: ForwardBatch  # the input buffers of the program
    replay: Callable[[], None]
    logits: Tensor  # the output buffer


class CapturedForward:
    """Replays captured programs for small decode steps, and runs other steps eagerly.

    Small decode steps usually call only our own kernels, and can then be captured.
    """

    def __init__(self, eager: EagerForward, ops: NumbaOps, max_model_len: int) -> None:
        self.eager = eager
        self.launcher = ops.launcher
        self.max_model_len = max_model_len
        self.max_rows = ops.max_linear_rows
        self._steps: dict[int, CapturedStep] = {}  # keyed by the number of rows

    def __call__(self, plan: StepPlan) -> StepLogits:
        num_rows = len(plan.slots)
        if num_rows > self.max_rows or not is_decode(plan):
            return self.eager(plan)
        batch = self.eager.batch(plan)
        step = self._steps.get(num_rows) or self._try_to_capture(batch)
        if step is None:
            return self.eager(plan)
        for source, target in zip(_inputs(batch), _inputs(step.batch), strict=True):
            target.copy_(source)
        step.replay()
        return self.eager.step_logits(step.logits, plan)

    def prepare(self) -> None:
        """Capture the step for one row now, so that the first completion does not wait for it."""
        self._try_to_capture(self.eager.batch(one_row()))

    def _try_to_capture(self, batch: ForwardBatch) -> CapturedStep | None:
        try:
            step = self._capture(batch)
        except NotCapturableError as error:
            logger.warning("Decode steps run eagerly, which is slower: %s", error)
            self.max_rows = 0
            return None
        self._steps[len(batch.input_ids)] = step
        return step

    def _capture(self, batch: ForwardBatch) -> CapturedStep:
        plan = batch.attention
        static = replace(
            batch,
            input_ids=batch.input_ids.clone(),
            positions=batch.positions.clone(),
            slot_mapping=batch.slot_mapping.clone(),
            recurrent=batch.recurrent and RecurrentRows(batch.recurrent.slots.clone()),
            attention=NumbaPlan(
                plan.tokens.clone(),
                plan.lengths.clone(),
                plan.block_tables.clone(),
                self.max_model_len,
                [],
            ),
        )
        program, logits = self.launcher.capture(lambda: self.eager.model(static))
        return CapturedStep(static, program.run, logits)


def one_row() -> StepPlan:
    """Return the plan of a dummy decode step; running it compiles every kernel."""
    one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
    return StepPlan(none, none, one, one, [], [], [], num_decode_tokens=1)


def _inputs(batch: ForwardBatch) -> list[Tensor]:
    """Return the tensors of a batch that differ between steps."""
    recurrent = [] if batch.recurrent is None else [batch.recurrent.slots]
    attention = [batch.attention.lengths, batch.attention.block_tables]
    return [batch.input_ids, batch.positions, batch.slot_mapping, *recurrent, *attention]
