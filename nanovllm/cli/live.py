"""LiveView: shows what `LLM.stream` yields, answers in order, with a progress bar below them."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from nanovllm.cli.run_stats import RunStats
from nanovllm.cli.terminal import Screen, open_screen
from nanovllm.outputs import StepOutput, StreamPiece

FRAME_SECONDS = 0.05  # between two redraws: smooth to the eye, free for the engine
BAR_LENGTH = 20
MAX_HEADING = 200


class LiveView:
    """Prompts run together but are read one by one: the first unfinished answer streams live,
    the others are kept until their turn comes.

    >>> with LiveView(prompts, max_tokens=64) as view:
    ...     for piece in llm.stream(prompts, params, on_step=view.on_step):
    ...         view.show(piece)
    >>> print(view.summary())
    """

    def __init__(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        screen: Screen | None = None,
        *,
        has_headings: bool = True,
        frame_seconds: float = FRAME_SECONDS,
    ) -> None:
        self.stats = RunStats()
        self._screen = screen or open_screen(sys.stdout)
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._has_headings = has_headings
        self._frame_seconds = frame_seconds
        self._turn = 0  # of the prompt that is being shown
        self._has_begun = self._has_written = False
        self._kept: defaultdict[int, list[str]] = defaultdict(list)  # prompt -> text not shown yet
        self._finished: set[int] = set()  # prompts that wait for their turn to end
        self._skipped: set[int] = set()
        self._num_tokens_done = 0  # of max_tokens for every prompt
        self._drawn_at = 0.0

    def on_step(self, step: StepOutput) -> None:
        """Count an engine step, for the speeds in the progress bar."""
        self.stats.add_step(step)
        self._draw_if_due()

    def show(self, piece: StreamPiece) -> None:
        """Show a piece of an answer, now or when its prompt's turn comes."""
        self._kept[piece.index].append(piece.text)
        self._num_tokens_done += len(piece.token_ids)
        if piece.output is not None:
            self.stats.outputs.append(piece.output)
            self._num_tokens_done += self._max_tokens - len(piece.output.token_ids)
            self._finished.add(piece.index)
        self._advance()
        self._draw_if_due()

    def skip(self, index: int) -> None:
        """Pass over a prompt that will have no answer."""
        self._skipped.add(index)
        self._num_tokens_done += self._max_tokens
        self._advance()

    def summary(self) -> str:
        return self.stats.summary()

    def close(self) -> None:
        """Draw what is left and take the progress bar away."""
        self._screen.close()

    def __enter__(self) -> LiveView:
        self._draw_if_due()  # a long prompt takes its time before the first step is done
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self) -> None:
        """Write what the turn allows, and pass the turn on past every finished answer."""
        while self._turn in self._kept or self._turn in self._skipped:
            if self._turn in self._skipped:
                self._turn += 1
                continue
            self._begin()
            self._screen.write("".join(self._kept[self._turn]))
            if self._turn not in self._finished:
                self._kept[self._turn].clear()
                return
            self._screen.end_answer()
            del self._kept[self._turn]
            self._finished.remove(self._turn)
            self._turn += 1
            self._has_begun = False

    def _begin(self) -> None:
        if self._has_begun or not self._has_headings:
            return
        self._has_begun = True
        prompt = " ".join(self._prompts[self._turn].split())
        if len(prompt) > MAX_HEADING:
            prompt = prompt[:MAX_HEADING] + " ..."
        if self._has_written:
            self._screen.write("\n")
        self._has_written = True
        self._screen.heading(f"[{self._turn + 1}/{len(self._prompts)}] {prompt}")

    def _draw_if_due(self) -> None:
        now = time.perf_counter()
        if now - self._drawn_at >= self._frame_seconds:
            self._drawn_at = now
            self._screen.draw(self._status())

    def _status(self) -> str:
        stats, num_prompts = self.stats, len(self._prompts)
        length = BAR_LENGTH * self._num_tokens_done // max(self._max_tokens * num_prompts, 1)
        bar = "#" * length + "-" * (BAR_LENGTH - length)
        speeds = f"prefill {stats.prefill.speed:,.0f} tok/s, decode {stats.decode.speed:,.0f} tok/s"
        return f"[{bar}] {len(stats.outputs)}/{num_prompts} | {speeds} | {stats.seconds:.1f} s"
