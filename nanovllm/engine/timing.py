"""Timings of recent steps and sequences, which snapshots and traces show."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.engine.request import FinishedSequence, FinishReason

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Step

MAX_RECORDED = 1024  # maximum length of `StepLog.timings` and of `StepLog.ended`


class StepTiming(NamedTuple):
    """Timing of one call of `EngineCore.step`, and of the step whose result it collected, if any.

    Times are seconds of `time.perf_counter`.
    """

    begin: float
    # Durations of the four phases of the call.
    schedule: float
    submit: float  # like `commit`, may include computing bitmasks
    wait: float
    commit: float
    device_begin: float  # earliest time at which the device could start the step
    device: float  # duration from `device_begin` to the arrival of the result
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_rows: int = 0  # 0 if no result was collected
    num_accepted_tokens: int = 0  # accepted draft tokens, included in num_decode_tokens


class SequenceEnd(NamedTuple):
    """Timestamps of a finished sequence, in seconds of `time.perf_counter`."""

    seq_id: int
    reason: FinishReason
    num_new_tokens: int
    start: float  # when its first step was scheduled; 0 if none was
    first_token: float  # 0 if there was no token
    end: float
    arrival: float


class StepLog:
    """Recent steps and ended sequences, kept until a snapshot takes them."""

    def __init__(self) -> None:
        self.timings: deque[StepTiming] = deque(maxlen=MAX_RECORDED)
        self.ended: deque[SequenceEnd] = deque(maxlen=MAX_RECORDED)

    def add_step(self, times: list[float], step: Step | None) -> None:
        """Record a call of `EngineCore.step`, and the step that it collected.

        `times` are those of its begin, after scheduling, after the submission, and of its end.
        """
        begin, scheduled, submitted, end = times
        schedule, submit = scheduled - begin, submitted - scheduled
        if step is None:
            self.timings.append(StepTiming(begin, schedule, submit, 0.0, 0.0, end, 0.0))
            return
        self.timings.append(
            StepTiming(
                begin,
                schedule,
                submit,
                step.result_time - submitted,
                end - step.result_time,
                step.result_time - step.device_seconds,
                step.device_seconds,
                step.plan.num_prefill_tokens,
                step.num_decode_tokens - step.draft_counts.num_rejected_tokens,
                len(step.rows),
                step.draft_counts.num_accepted_tokens,
            )
        )

    def add_end(self, seq: FinishedSequence, arrival_time: float) -> None:
        times = seq.start_time, seq.first_token_time, seq.end_time, arrival_time
        self.ended.append(SequenceEnd(seq.seq_id, seq.finish_reason, len(seq.token_ids), *times))

    def clear(self) -> None:
        self.timings.clear()
        self.ended.clear()
