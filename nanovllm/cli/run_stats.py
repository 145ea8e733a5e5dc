"""What a run of prompts did: tokens, speeds, waiting times, and a summary of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.outputs import RequestOutput, StepOutput


@dataclass(slots=True)
class Phase:
    """Tokens run in prefill or in decode, and the time they took."""

    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens += num_tokens
        self.seconds += seconds

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


class RunStats:
    """Feed it every step and every finished output; read it at any time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.prefill, self.decode = Phase(), Phase()
        self.outputs: list[RequestOutput] = []
        self._clock = clock
        self._start = self._paused_at = self._step_start = clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def pause(self) -> None:
        """Stop the clock until `resume`: somebody reads, thinks and types."""
        self._paused_at = self._clock()

    def resume(self) -> None:
        self._step_start = self._clock()
        self._start += self._step_start - self._paused_at

    def add_step(self, step: StepOutput) -> None:
        """Count a step; one that mixes prefill and decode shares its time out by tokens."""
        num_tokens = step.num_prefill_tokens + step.num_decode_tokens
        if not num_tokens:  # only fills the pipeline: its time belongs to the step that follows
            return
        now = self._clock()
        seconds_per_token = (now - self._step_start) / num_tokens
        self.prefill.add(step.num_prefill_tokens, step.num_prefill_tokens * seconds_per_token)
        self.decode.add(step.num_decode_tokens, step.num_decode_tokens * seconds_per_token)
        self._step_start = now

    def summary(self) -> str:
        outputs, count = self.outputs, max(len(self.outputs), 1)
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        num_new = sum(len(output.token_ids) for output in outputs)
        reasons = Counter(output.finish_reason for output in outputs)
        first = sum(output.time_to_first_token for output in outputs) / count
        rows = {
            "prompts": f"{len(outputs)}, {num_prompt:,} tokens",
            "generated": f"{num_new:,} tokens in {self.seconds:.2f} s",
            "prefill": f"{self.prefill.speed:,.0f} tok/s ({self.prefill.num_tokens:,} tokens)",
            "decode": f"{self.decode.speed:,.0f} tok/s ({self.decode.num_tokens:,} tokens)",
            "first token": f"after {first:.2f} s on average",
            "prefix cache": f"{num_cached:,} of {num_prompt:,} prompt tokens",
            "finished": ", ".join(f"{reasons[reason]} by {reason}" for reason in sorted(reasons)),
        }
        return "\n".join(f"{name:<14}{value}" for name, value in rows.items())


def why_empty(output: RequestOutput) -> str:
    """Explain an answer without text."""
    if output.error is not None:
        return output.error
    count = len(output.token_ids)
    if output.finish_reason == "stop":
        when = "at once" if count <= 1 else f"after {count} tokens that are no text"
        return f"no text: the model ended its answer {when} (a stop string counts as an end)"
    return f"no text: the {count} tokens that the model wrote are blank or special ones"
