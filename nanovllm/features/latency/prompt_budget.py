"""Limit the prompt tokens that a step runs alongside decode rows, to bound inter-token latency."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from nanovllm.engine.feature import Feature

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler, Step
    from nanovllm.engine.sequence import Sequence, WaitingQueue
    from nanovllm.engine.step import StepResult

# Prompt tokens allowed in every step, by device, so that prompts always make progress. On a CPU, a
# chunk of 64 tokens takes twice as long per token as one of 1,024, since each chunk upcasts or
# dequantizes all weights.
MIN_PROMPT_TOKENS = {"cpu": 256, "cuda": 64}
# While several prompts of one request wait, a step without decode rows is limited to this multiple
# of the target, but at least MIN_QUEUED_TOKENS, which bounds the wait of other requests.
QUEUED_RATIO, MIN_QUEUED_TOKENS = 4.0, 128
MAX_HEADS = 16  # number of waiting requests whose first prompts are considered
FIRST_SECONDS_PER_TOKEN = 80e-6  # estimate before the first measurement
MARGIN = 0.8  # fraction of the target to aim for, because equal steps vary in duration
# After the first measurement, the ratio of measured to estimated time is limited by MAX_RATIO and
# raised to the power WEIGHT, to dampen outliers.
MAX_RATIO, WEIGHT = 2.0, 0.25


class PromptBudget(Feature):
    """Limits the prompt tokens of a step; requests with many prompts take turns with the others.

    The seconds per token are estimated from measured steps, as a geometric moving average.
    """

    def __init__(self, target_seconds: float, min_prompt_tokens: int) -> None:
        self._min_prompt_tokens = min_prompt_tokens
        self._seconds = MARGIN * target_seconds
        self._seconds_per_token = FIRST_SECONDS_PER_TOKEN
        self._is_measured = False
        # seq_ids of prompts that share what others leave of the step being planned: `_room` tokens.
        self._yielding: set[int] = set()
        self._room = 0
        # request_ids of which a prompt that is admitted in this step takes at most `_share` tokens.
        self._sharing: set[str] = set()
        self._share = 0

    def joins(self, seq: Sequence) -> bool:
        return True

    def begin_step(self, scheduler: Scheduler, step: Step) -> None:
        prompts, num_decode_rows = [], 0
        for seq in scheduler.running.values():
            if seq.num_tokens - seq.num_computed > 1:
                prompts.append(seq)
            elif seq.num_tokens < seq.max_len:
                num_decode_rows += 1
        series = [seq for seq in prompts if scheduler.waiting.has_more(seq)]
        if num_decode_rows:
            most = self.num_prompt_tokens(num_decode_rows)
            step.prompt_budget = min(step.prompt_budget, most)
        elif scheduler.allow_chunks and (series or scheduler.waiting.has_series):
            step.prompt_budget = min(step.prompt_budget, self.num_queued_tokens())
        self._yielding, self._sharing = set(), set()
        if series and scheduler.allow_chunks:
            self._yield(scheduler, step, prompts, series)
        elif scheduler.waiting.has_series and scheduler.allow_chunks:
            self._halve(scheduler.waiting, step)

    def _halve(self, waiting: WaitingQueue, step: Step) -> None:
        """Let a request with many prompts begin with half of the step, if others wait, too."""
        heads = list(islice(waiting.heads(), MAX_HEADS))
        if len(heads) > 1:
            self._sharing = {seq.request_id for seq in heads if waiting.has_several(seq)}
            self._share = -(-min(step.budget, step.prompt_budget) // 2)
            step.excluded |= self._sharing

    def _yield(
        self, scheduler: Scheduler, step: Step, prompts: list[Sequence], series: list[Sequence]
    ) -> None:
        """Leave to other requests what they need of the step.

        Running prompts come first. Waiting ones get at most three quarters of the rest.
        """
        request_ids = {seq.request_id for seq in series}
        least = min(seq.priority for seq in series)
        running = [seq for seq in prompts if seq.request_id not in request_ids]
        num_free = scheduler.max_num_seqs - len(scheduler.running)
        heads = islice(scheduler.waiting.heads(request_ids), min(num_free, MAX_HEADS))
        waiting = [seq for seq in heads if seq.priority <= least]
        if not running and not waiting:
            return
        room = min(step.budget, step.prompt_budget)
        room -= min(sum(seq.num_tokens - seq.num_computed for seq in running), room)
        blocks, num_wanted = scheduler.blocks, 0
        for seq in waiting:
            if num_wanted < room:
                num_wanted += len(seq.token_ids) - len(blocks.match(seq)) * blocks.block_size
        self._room = max(room - num_wanted, -(-room // 4))
        self._yielding = {seq.seq_id for seq in series}
        step.served |= request_ids
        step.excluded |= request_ids

    def row_end(self, seq: Sequence, end: int, limit: int) -> int:
        if seq.seq_id in self._yielding:
            end = min(end, seq.num_computed + self._room)
            self._room -= end - seq.num_computed
        elif seq.request_id in self._sharing and end <= seq.num_tokens:
            end = min(end, seq.num_computed + self._share)
        return end

    def committed(self, step: Step, result: StepResult) -> None:
        self.measured(step.plan.num_prefill_tokens, step.num_decode_tokens, step.device_seconds)

    def num_prompt_tokens(self, num_decode_rows: int) -> int:
        """Return how many prompt tokens may run alongside `num_decode_rows` decode rows."""
        num_tokens = int(self._seconds / self._seconds_per_token)
        return max(self._min_prompt_tokens, _round_down(num_tokens) - num_decode_rows)

    def num_queued_tokens(self) -> int:
        """Return how many tokens of a request with several prompts may run without decode rows."""
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


def _round_down(num_tokens: int) -> int:
    """Round down to 2**k or 1.5 * 2**k, the sizes of prefill graphs; steps are padded to them."""
    power = 1 << (max(num_tokens, 1).bit_length() - 1)
    return power + power // 2 if num_tokens >= power + power // 2 else power


def _round_up(num_tokens: int) -> int:
    size = _round_down(num_tokens)
    return size if size == num_tokens else _round_down(size + size // 2)
