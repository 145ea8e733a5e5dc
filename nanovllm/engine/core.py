"""EngineCore: each call of `step` launches the next step and collects the oldest in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

import numpy as np

from nanovllm.engine.executor import Executor
from nanovllm.engine.request import (
    POOL_TOO_SMALL,
    EngineCoreOutputs,
    FinishedSequence,
    FinishReason,
    Request,
    TokenLogprobs,
)
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Bitmasks
from nanovllm.engine.timing import StepLog
from nanovllm.errors import EngineError

# While all sequences are postponed, the time to the next step is POLL_SECONDS times the number of
# such steps in a row, of which at most MAX_FACTOR count.
POLL_SECONDS, MAX_FACTOR = 0.001, 20
# Bitmasks that allow every token.
NO_BITMASKS = Bitmasks(np.zeros(0, np.int32), np.zeros((0, 0), np.int32))


class EngineCore:
    """Takes requests and returns tokens. Handles neither text nor tensors.

    Not thread-safe, except for `check`. Unusable after an exception in `step`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int,
        max_model_len: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        # A sequence ends when it fills the whole KV cache: if preempted, it could never resume.
        pool_len = scheduler.blocks.max_tokens()
        self.max_len = min(max_model_len, pool_len)
        self._is_pool_short = pool_len < max_model_len
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[Step] = deque()
        self._clock = clock
        self._last_result_time = 0.0
        self._num_polls = 0  # number of consecutive steps in which all sequences were postponed
        self.log: StepLog | None = None  # set while a client subscribes to snapshots
        self._failure: str | None = None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    @property
    def wait_seconds(self) -> float:
        """How long to wait before the next step; 0 unless all sequences are postponed."""
        return POLL_SECONDS * self._num_polls

    def check(self, request: Request) -> None:
        """Raise RequestError if the request can never run. Safe in any thread."""
        self.raise_if_failed()
        request.check_length(self.max_len)

    def add(self, request: Request) -> None:
        """Queue a request; raise RequestError, and keep no state, if it can never run."""
        self.check(request)
        seq = Sequence(request)
        if request.pooling is None:
            seq.is_cut_by_pool = self._is_pool_short and seq.max_len > self.max_len
            seq.max_len = min(seq.max_len, self.max_len)
        self.scheduler.add(seq)
        self._sequences[seq.seq_id] = seq

    def step(self) -> EngineCoreOutputs:
        """Launch the next step, if any, and collect the oldest one in flight.

        Collect nothing if a step was launched and at most `depth` steps are in flight.
        """
        self.raise_if_failed()
        try:
            return self._step()
        except BaseException as error:
            # Keep only the text: the exception's traceback refers to the engine, so keeping it
            # would create a reference cycle.
            self._failure = repr(error)
            raise

    def _step(self) -> EngineCoreOutputs:
        times = [self._clock()]
        step, oldest = self.scheduler.schedule(), None
        times.append(self._clock())
        if step is not None:
            step.submit_time = times[-1]
            step.pending = self.executor.submit(step.plan)
            self._in_flight.append(step)
            if len(self._in_flight) == 1:
                self._send_bitmasks()
        times.append(self._clock())
        outputs = EngineCoreOutputs([], [], [])
        if self._in_flight and (step is None or len(self._in_flight) > self.depth):
            oldest = self._in_flight.popleft()
            outputs = self._collect(oldest)
        if self.log is not None and (step or oldest):
            self.log.add_step([*times, self._clock()], oldest)
        if not self._in_flight and oldest is None and self._sequences:
            assert self.scheduler.postponed, "sequences are waiting, but nothing runs"
            self._num_polls = min(self._num_polls + 1, MAX_FACTOR)
        else:
            self._num_polls = 0
        return outputs

    def finish(self, seq_id: int, reason: FinishReason) -> FinishedSequence | None:
        """End a sequence now; return None if it has ended already or is unknown.

        Tokens that steps in flight still sample for it are discarded.
        """
        seq = self._sequences.get(seq_id)
        if seq is None:
            return None
        if self._failure is None:
            self.scheduler.finish(seq, reason)
        else:  # the failed step may have left the scheduler's state inconsistent
            seq.finish_reason = seq.finish_reason or reason
        return self._leave(seq)

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has failed and cannot be used again: {self._failure}")

    def _collect(self, step: Step) -> EngineCoreOutputs:
        """Wait for a step, which was the oldest in flight, and commit it."""
        result = step.pending.result()
        step.result_time = now = self._clock()
        # The device runs one step at a time, so this step began after the previous one ended.
        step.seconds = now - self._last_result_time
        step.device_seconds = min(now - step.submit_time, step.seconds)
        self._last_result_time = now
        if result.is_lost:
            return self._drop(step)
        updated = self.scheduler.commit(step, result)
        if self._in_flight:
            self._send_bitmasks()
        streaming = [seq for seq in updated if seq.is_streaming]
        no_logprobs: list[TokenLogprobs | None] = [None]
        return EngineCoreOutputs(
            seq_ids=[seq.seq_id for seq in streaming for _ in range(seq.num_new)],
            token_ids=[each for seq in streaming for each in seq.new_token_ids],
            logprobs=[
                each for seq in streaming for each in seq.new_logprobs or no_logprobs * seq.num_new
            ],
            finished=[self._leave(seq) for seq in updated if seq.finish_reason is not None],
            num_prefill_tokens=step.plan.num_prefill_tokens,
            num_decode_tokens=step.num_decode_tokens - step.draft_counts.num_rejected_tokens,
        )

    def _drop(self, lost: Step) -> EngineCoreOutputs:
        """Discard a lost step and those in flight, which depend on it; preempt all sequences."""
        for step in self._in_flight:
            if step.get_bitmasks is not None:  # the step has not been sampled yet
                self.executor.sample(NO_BITMASKS)
            step.pending.result()
        self.scheduler.drop([lost, *self._in_flight])
        self._in_flight.clear()
        return EngineCoreOutputs([], [], [])

    def _send_bitmasks(self) -> None:
        """Complete the oldest step in flight: the tokens that it depends on are now known."""
        oldest = self._in_flight[0]
        if oldest.get_bitmasks is not None:
            allocate = self.executor.mask_memory
            self.executor.sample(oldest.get_bitmasks(self.scheduler, oldest, allocate))

    def _leave(self, seq: Sequence) -> FinishedSequence:
        assert seq.finish_reason is not None
        del self._sequences[seq.seq_id]
        is_cut = seq.is_cut_by_pool and seq.finish_reason == "length"
        finished = FinishedSequence(
            seq_id=seq.seq_id,
            token_ids=seq.output_token_ids,
            finish_reason=seq.finish_reason,
            num_cached_tokens=seq.num_cached,
            start_time=seq.start_time,
            first_token_time=seq.first_token_time,
            end_time=self._clock(),
            # A copy, because a step in flight may still append.
            prompt_logprobs=list(seq.prompt_logprobs),
            pooled=seq.pooled,
            error=seq.error,
            stop_reason=POOL_TOO_SMALL if is_cut else None,
            drafts=seq.draft_counts,
        )
        if self.log is not None:
            self.log.add_end(finished, seq.request.arrival_time)
        return finished
