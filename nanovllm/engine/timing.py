"""Timings of recent steps and sequences, which snapshots and traces show."""

from __future__ import annotations

from typing import NamedTuple

from nanovllm.engine.request import FinishReason


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
