"""EngineCore: each call of `step` launches the next step and collects the oldest in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

from nanovllm.engine.executor import Executor
from nanovllm.engine.grammar import GrammarEngine
from nanovllm.engine.request import (
    POOL_TOO_SMALL,
    EngineCoreOutputs,
    FinishedSequence,
    FinishReason,
    Request,
    TokenLogprobs,
)
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, check_length
from nanovllm.engine.step import Pending, StepPlan, StepResult
from nanovllm.engine.timing import SequenceEnd, StepTiming
from nanovllm.errors import EngineError

MAX_RECORDED = 1024  # maximum length of `timings` and of `ended`


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
        get_grammars: Callable[[], GrammarEngine] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self._get_grammars = get_grammars
        self.executor = executor
        self.depth = depth
        # A sequence ends when it fills the whole KV cache: if preempted, it could never resume.
        pool_len = scheduler.blocks.num_blocks * scheduler.blocks.block_size
        self.max_len = min(max_model_len, pool_len)
        self._is_pool_short = pool_len < max_model_len
        self._sequences: dict[int, Sequence] = {}
        # Plans in flight, each with its pending result and the time of its submission.
        self._in_flight: deque[tuple[StepPlan, Pending[StepResult], float]] = deque()
        self._clock = clock
        self._last_result_time = 0.0
        # Recent steps and ended sequences, kept until a snapshot takes them.
        self.timings: deque[StepTiming] = deque(maxlen=MAX_RECORDED)
        self.ended: deque[SequenceEnd] = deque(maxlen=MAX_RECORDED)
        self._failure: str | None = None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def check(self, request: Request) -> None:
        """Raise RequestError if the request can never run. Safe in any thread."""
        self.raise_if_failed()
        check_length(request, self.max_len)

    def add(self, request: Request) -> None:
        """Queue a request; raise RequestError, and keep no state, if it can never run."""
        self.check(request)
        seq = Sequence(request)
        if request.leader_id is not None:
            seq.leader = self._sequences.get(request.leader_id)
        if request.pooling is None:
            seq.is_cut_by_pool = self._is_pool_short and seq.max_len > self.max_len
            seq.max_len = min(seq.max_len, self.max_len)
        if request.grammar is not None:
            seq.matcher = self._grammars.matcher(request.grammar, request.stop_token_ids)
        self._sequences[seq.seq_id] = seq
        self.scheduler.add(seq)

    def step(self) -> EngineCoreOutputs:
        """Launch the next step, if any, and collect the oldest one in flight.

        Collect nothing if a step was launched and at most `depth` steps are in flight.
        """
        self.raise_if_failed()
        try:
            begin = self._clock()
            plan = self.scheduler.schedule()
            scheduled = self._clock()
            if plan is not None:
                self._in_flight.append((plan, self.executor.submit(plan), scheduled))
                if len(self._in_flight) == 1:
                    self._send_masks()
            if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
                return self._collect(begin, scheduled)
            if plan is not None:
                now = self._clock()
                schedule, submit = scheduled - begin, now - scheduled
                self.timings.append(StepTiming(begin, schedule, submit, 0.0, 0.0, now, 0.0))
        except BaseException as error:
            # Keep only the text: the exception's traceback refers to the engine, so keeping it
            # would create a reference cycle.
            self._failure = repr(error)
            raise
        if not self._in_flight and self._sequences:
            assert self.scheduler.waiting_for_grammar, "sequences are waiting, but nothing runs"
            matchers = [seq.matcher for seq in self.scheduler.waiting_for_grammar.values()]
            self._grammars.wait([matcher for matcher in matchers if matcher is not None])
        return EngineCoreOutputs([], [], [])

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

    def _collect(self, begin: float, scheduled: float) -> EngineCoreOutputs:
        """Wait for the oldest step in flight, commit it and record the timing of this call."""
        plan, pending, submit_time = self._in_flight.popleft()
        submitted = self._clock()
        result = pending.result()
        result_time = self._clock()
        # The device runs one step at a time, so this step began after the previous one ended.
        device_begin = max(submit_time, self._last_result_time)
        device = result_time - device_begin
        draft_counts = self.scheduler.draft_counts
        num_accepted = draft_counts.num_accepted_tokens
        step = self._drop_in_flight() if result.is_lost else self._commit(plan, result, device)
        drafter = self.scheduler.drafter
        if drafter is not None and not plan.num_prefill_tokens and not result.is_lost:
            # Include the time in which the device waited for this plan: drafting delays the plan.
            seconds = result_time - self._last_result_time
            counts = len(plan.counts), plan.num_decode_tokens, step.num_decode_tokens
            drafter.measured(*counts, seconds)
        self.timings.append(
            StepTiming(
                begin,
                scheduled - begin,
                submitted - scheduled,
                result_time - submitted,
                self._clock() - result_time,
                device_begin,
                device,
                step.num_prefill_tokens,
                step.num_decode_tokens,
                len(plan.counts),
                draft_counts.num_accepted_tokens - num_accepted,
            )
        )
        self._last_result_time = result_time
        return step

    def _commit(self, plan: StepPlan, result: StepResult, seconds: float) -> EngineCoreOutputs:
        draft_counts = self.scheduler.draft_counts
        num_before = draft_counts.num_rejected_tokens
        updated = self.scheduler.commit(plan, result, seconds)
        num_rejected = draft_counts.num_rejected_tokens - num_before
        if self._in_flight:
            self._send_masks()
        streaming = [
            seq for seq in updated if seq.is_streaming and seq.request.params.max_tokens != 0
        ]
        no_logprobs: list[TokenLogprobs | None] = [None]
        return EngineCoreOutputs(
            [seq.seq_id for seq in streaming for _ in range(seq.num_new)],
            [each for seq in streaming for each in seq.new_token_ids],
            [self._leave(seq) for seq in updated if seq.finish_reason is not None],
            [each for seq in streaming for each in seq.new_logprobs or no_logprobs * seq.num_new],
            plan.num_prefill_tokens,
            plan.num_decode_tokens - num_rejected,
        )

    def _drop_in_flight(self) -> EngineCoreOutputs:
        """Discard the steps in flight, which depend on a lost step, and preempt all sequences."""
        for plan, pending, _ in self._in_flight:
            if len(plan.masked_rows):  # the step waits for bitmasks: allow every token
                num_masks = int(plan.num_logits[plan.masked_rows].sum())
                ended: list[tuple[None, list[int]]] = [(None, [])] * num_masks
                self.executor.sample(self._grammars.masks(ended, self.executor.mask_memory)[0])
            pending.result()
        self._in_flight.clear()
        self.scheduler.drop_in_flight()
        return EngineCoreOutputs([], [], [])

    def _send_masks(self) -> None:
        """Send bitmasks for the oldest step in flight: the tokens they depend on are now known."""
        plan = self._in_flight[0][0]
        if len(plan.masked_rows):
            rows = self.scheduler.matchers(plan)
            masks, late = self._grammars.masks(rows, self.executor.mask_memory)
            self.scheduler.wait_for_grammar(plan.masked_rows[late].tolist())
            self.executor.sample(masks)

    @property
    def _grammars(self) -> GrammarEngine:
        assert self._get_grammars is not None, "there is no grammar engine"
        return self._get_grammars()

    def _leave(self, seq: Sequence) -> FinishedSequence:
        assert seq.finish_reason is not None
        del self._sequences[seq.seq_id]
        token_ids, end_time = seq.output_token_ids, self._clock()
        self.ended.append(
            SequenceEnd(
                seq.seq_id,
                seq.finish_reason,
                len(token_ids),
                seq.start_time,
                seq.first_token_time,
                end_time,
                seq.request.arrival_time,
            )
        )
        return FinishedSequence(
            seq.seq_id,
            token_ids,
            seq.finish_reason,
            seq.num_cached,
            seq.start_time,
            seq.first_token_time,
            end_time,
            list(seq.prompt_logprobs),  # a copy, because a step in flight may still append
            seq.pooled,
            seq.error,
            POOL_TOO_SMALL if seq.is_cut_by_pool and seq.finish_reason == "length" else None,
            seq.draft_counts,
        )
