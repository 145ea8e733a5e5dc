"""A progress bar for whoever waits for a job."""

from __future__ import annotations

import sys

from tqdm import tqdm

from nanovllm.serving.engine_thread import Job


class Progress:
    """A progress bar over the prompts of a job that shows the speed of prefill and decode.

    One that is not shown is none: all bars share a lock, which a Ctrl-C may leave taken.
    """

    def __init__(self, job: Job, is_shown: bool) -> None:
        self._job = job
        self._bar: tqdm | None = None
        if is_shown and sys.stderr is not None:
            self._bar = tqdm(total=len(job.requests), desc="Prompts", dynamic_ncols=True)

    def update(self) -> None:
        if self._bar is None:
            return
        job = self._job
        prefill, decode = job.speeds.prefill.speed, job.speeds.decode.speed
        self._bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s", False)
        self._bar.update(len(job.outputs) - self._bar.n)

    def close(self) -> None:
        self.update()
        if self._bar is not None:
            self._bar.close()
