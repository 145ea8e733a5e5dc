"""Limit the prompt tokens that a step runs alongside decode rows, to bound inter-token latency."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanovllm.engine.feature import Feature

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler, Step
    from nanovllm.engine.sequence import Sequence
    from nanovllm.engine.step import StepResult

# Minimum limit on prompt tokens, by device, so that prompts always make progress. On a CPU, a
# chunk of 64 tokens takes twice as long per token as one of 1,024, since each chunk upcasts or
# dequantizes all weights.
MIN_PROMPT_TOKENS = {"cpu": 256, "cuda": 64}
# A request is large while it has several unfinished prompts, of more than SMALL tokens in all.
SMALL = 256
# In a step without decode rows, the prompts of large requests are limited to this multiple of the
# target, but at least MIN_QUEUED_TOKENS, which bounds the wait of other requests.
QUEUED_RATIO, MIN_QUEUED_TOKENS = 4.0, 128
SHARED_PART = 0.25  # fraction of the limit for large requests while others have prompts
FIRST_SECONDS_PER_TOKEN = 80e-6  # estimate before the first measurement
MARGIN = 0.8  # fraction of the target to aim for, because equal steps vary in duration
# After the first measurement, the ratio of measured to estimated time is clamped to
# [1 / MAX_RATIO, MAX_RATIO] and raised to the power WEIGHT, to dampen outliers.
MAX_RATIO, WEIGHT = 2.0, 0.25


class PromptBudget(Feature):
    """Limits the prompt tokens of a step, above all those of large requests.

    The seconds per token are estimated from measured steps, as a geometric moving average.
    """

    _step: Step  # the one being planned

    def __init__(self, target_seconds: float, min_prompt_tokens: int) -> None:
        self._min_prompt_tokens = min_prompt_tokens
        self._seconds = MARGIN * target_seconds
        self._seconds_per_token = FIRST_SECONDS_PER_TOKEN
        self._is_measured = False
        # Number of unfinished sequences of each request_id, and of their prompt tokens.
        self._unfinished: dict[str, tuple[int, int]] = {}
        self._large: set[str] = set()  # request_ids of large requests
        self._room = 0  # number of tokens that large requests may still add to the step

    def joins(self, seq: Sequence) -> bool:
        self._count(seq, 1)
        return True

    def ended(self, seq: Sequence) -> None:
        self._count(seq, -1)

    def begin_step(self, scheduler: Scheduler, step: Step) -> None:
        prompts, num_decode_rows = [], 0
        for seq in scheduler.running.values():
            if seq.num_tokens - seq.num_computed > 1:
                prompts.append(seq)
            elif seq.num_tokens < seq.max_len:
                num_decode_rows += 1
        if num_decode_rows:
            most = self.num_prompt_tokens(num_decode_rows)
            step.prompt_budget = min(step.prompt_budget, most)
        self._step, self._room = step, step.prompt_budget
        if self._large and scheduler.allow_chunks:
            if not num_decode_rows:
                self._room = min(self._room, self.num_queued_tokens())
            if self._must_share(scheduler, prompts):
                self._room = math.ceil(SHARED_PART * self._room)
            else:
                step.prompt_budget = self._room

    def row_end(self, seq: Sequence, end: int, limit: int) -> int:
        if seq.request_id in self._large and seq.num_tokens - seq.num_computed > 1:
            end = min(end, seq.num_computed + self._room)
            self._room -= end - seq.num_computed
            if not self._room:
                self._step.excluded = self._large
        return end

    def committed(self, step: Step, result: StepResult) -> None:
        self.measured(step.plan.num_prefill_tokens, step.num_decode_tokens, step.device_seconds)

    def num_prompt_tokens(self, num_decode_rows: int) -> int:
        """Return how many prompt tokens may run alongside `num_decode_rows` decode rows."""
        num_tokens = int(self._seconds / self._seconds_per_token)
        return max(self._min_prompt_tokens, _round_down(num_tokens) - num_decode_rows)

    def num_queued_tokens(self) -> int:
        """Return how many prompt tokens of large requests may run without decode rows."""
        num_tokens = int(QUEUED_RATIO * self._seconds / self._seconds_per_token)
        return max(MIN_QUEUED_TOKENS, _round_down(num_tokens))

    def measured(self, num_prompt_tokens: int, num_decode_rows: int, seconds: float) -> None:
        """Update the estimate with the duration of a step on the device."""
        num_tokens = _round_up(num_prompt_tokens + num_decode_rows)
        expected = num_tokens * self._seconds_per_token
        # Small steps take longer per token, so they are ignored unless they exceed the time limit.
        if not num_prompt_tokens or max(2 * expected, seconds) < self._seconds:
            return
        ratio = seconds / expected
        if self._is_measured:
            ratio = min(max(ratio, 1 / MAX_RATIO), MAX_RATIO) ** WEIGHT
        self._seconds_per_token *= ratio
        self._is_measured = True

    def _count(self, seq: Sequence, change: int) -> None:
        """Count a sequence that joined (1) or ended (-1), and whether its request is large."""
        num_seqs, num_tokens = self._unfinished.pop(seq.request_id, (0, 0))
        num_seqs, num_tokens = num_seqs + change, num_tokens + change * seq.num_prompt_tokens
        if num_seqs:
            self._unfinished[seq.request_id] = num_seqs, num_tokens
        num_samples = seq.request.params.n  # of each prompt
        if num_seqs > num_samples and num_tokens > num_samples * SMALL:
            self._large.add(seq.request_id)
        else:
            self._large.discard(seq.request_id)

    def _must_share(self, scheduler: Scheduler, prompts: list[Sequence]) -> bool:
        """Return whether a request that is not large is among the most urgent ones with prompts.

        `prompts` are running. Waiting requests count only while a slot is free.
        """
        candidates = list(prompts)
        if len(scheduler.running) < scheduler.max_num_seqs:
            waiting = scheduler.waiting
            candidates += filter(None, (waiting.first(), waiting.first(self._large)))
        urgent = min((seq.priority for seq in candidates), default=0)
        return any(
            seq.priority == urgent and seq.request_id not in self._large for seq in candidates
        )


def _round_down(num_tokens: int) -> int:
    """Round down to 2**k or 1.5 * 2**k, the sizes of prefill graphs; steps are padded to them."""
    power = 1 << (max(num_tokens, 1).bit_length() - 1)
    return power + power // 2 if num_tokens >= power + power // 2 else power


def _round_up(num_tokens: int) -> int:
    size = _round_down(num_tokens)
    return size if size == num_tokens else _round_down(size + size // 2)
