"""EngineCore: the loop. Launch the next step, collect the oldest, at any pipeline depth."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import StepPlan
from nanovllm.errors import EngineError, RequestError
from nanovllm.executor.base import Executor, Pending


@dataclass(frozen=True, slots=True)
class CoreStep:
    """What one call of `step` committed: `updated` sequences finished, or stream and grew."""

    updated: list[Sequence]
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class EngineCore:
    """Sequences in, tokens out. Knows neither text nor tensors."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, depth: int, max_model_len: int
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        # A sequence that outgrew the whole pool could never be resumed, so it ends there.
        pool_len = scheduler.blocks.num_blocks * scheduler.blocks.block_size
        self.max_len = min(max_model_len, pool_len)
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self._unreported: list[Sequence] = []  # their update was lost to an interrupt
        self._failure: str | None = None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; raises RequestError, and keeps nothing, when it can never run."""
        self._raise_if_failed()
        if seq.num_prompt_tokens >= self.max_len:
            raise RequestError(
                f"the prompt has {seq.num_prompt_tokens} tokens, but only {self.max_len - 1} fit "
                "(one must be left to generate); shorten it, or raise max_model_len or "
                "num_kvcache_blocks"
            )
        seq.max_len = min(seq.max_len, self.max_len)
        self._sequences[seq.seq_id] = seq
        self.scheduler.add(seq)

    def step(self) -> CoreStep:
        """Launch the next step if any, then collect the oldest once the pipeline is full."""
        self._raise_if_failed()
        if self._unreported:
            updated, self._unreported = self._unreported, []
            return CoreStep([seq for seq in updated if seq.seq_id in self._sequences])
        try:
            plan = self.scheduler.schedule()
            if plan is not None:
                self._in_flight.append((plan, self.executor.submit(plan)))
            if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
                return self._commit(*self._in_flight.popleft())
        except Exception as error:
            # Not the error itself: its traceback holds the engine, which would hold itself.
            self._failure = repr(error)
            raise
        except BaseException:  # Ctrl-C may land anywhere in a step; the engine outlives it
            self._in_flight.clear()
            self.scheduler.restart(self._sequences.values())
            self.report_again()
            raise
        assert self._in_flight or not self._sequences, "sequences wait but nothing runs"
        return CoreStep([])

    def finish(self, seq_id: int, reason: str) -> Sequence | None:
        """End a sequence now and hand it over; None if it is unknown.

        Whatever a step in flight still samples for it is dropped.
        """
        seq = self._sequences.pop(seq_id, None)
        if seq is None:
            return None
        self.scheduler.finish(seq, reason)
        return seq

    def report_again(self) -> None:
        """Let the next step return every sequence whose update may not have been seen."""
        self._unreported = [
            seq
            for seq in self._sequences.values()
            if seq.is_streaming or seq.finish_reason is not None
        ]

    def _commit(self, plan: StepPlan, pending: Pending) -> CoreStep:
        updated = self.scheduler.commit(plan, pending.result())
        return CoreStep(updated, plan.num_prefill_tokens, plan.num_decode_tokens)

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine failed earlier and cannot go on: {self._failure}")
