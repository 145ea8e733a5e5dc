"""What a run of prompts did: tokens, speeds, waiting times, and a summary of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from nanovllm.outputs import RequestOutput, StepOutput
from nanovllm.serving.speeds import Speeds


class RunStats:
    """Feed it every step and every finished output; read it at any time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._speeds = Speeds(clock)
        self.prefill, self.decode = self._speeds.prefill, self._speeds.decode
        self.outputs: list[RequestOutput] = []
        self._clock = clock
        self._start = self._paused_at = self._speeds.step_start

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def pause(self) -> None:
        """Stop the clock until `resume`: somebody reads, thinks and types."""
        self._paused_at = self._clock()

    def resume(self) -> None:
        self._speeds.step_start = self._clock()
        self._start += self._speeds.step_start - self._paused_at

    def add_step(self, step: StepOutput) -> None:
        self._speeds.add_step(step)

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
