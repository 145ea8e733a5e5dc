"""Print generated text to a terminal or a pipe, and collect the statistics of a run."""

from __future__ import annotations

import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from nanovllm.outputs import RequestOutput, StreamPiece

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESHES_PER_SECOND = 20
MAX_HEADING = 200
# Generated text must not control the terminal: drop control characters and expand tabs.
_CONTROLS: dict[int, str | None] = dict.fromkeys((*range(32), *range(127, 160)))
_CONTROLS |= {ord("\t"): "    ", ord("\n"): "\n"}


class RunStats:
    """Statistics of the streamed pieces and finished outputs of a run."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.seconds = 0.0
        self._num_pieces = 0

    def count(self, pieces: Iterable[StreamPiece]) -> Iterator[StreamPiece]:
        """Yield the pieces; count them and measure the time until the last one."""
        last = time.perf_counter()
        for piece in pieces:
            now = time.perf_counter()
            self.seconds, last = self.seconds + now - last, now
            self._num_pieces += 1
            if piece.output is not None:
                self.outputs.append(piece.output)
            yield piece

    def status(self, num_prompts: int) -> str:
        rate = self._num_pieces / max(self.seconds, 1e-9)  # most pieces hold one token
        return f"{len(self.outputs)}/{num_prompts} {rate:,.0f} tok/s"

    def summary(self) -> str:
        outputs, seconds = self.outputs, max(self.seconds, 1e-9)
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        num_new = sum(len(output.token_ids) for output in outputs)
        reasons = sorted(Counter(output.finish_reason for output in outputs).items())
        first = sum(output.time_to_first_token for output in outputs) / max(len(outputs), 1)
        rows = {
            "prompts": f"{len(outputs)}, {num_prompt:,} tokens",
            "generated": f"{num_new:,} tokens in {self.seconds:.2f} s",
            "speed": f"input {num_prompt / seconds:,.0f}, output {num_new / seconds:,.0f} tok/s",
            "first token": f"after {first:.2f} s on average",
            "prefix cache": f"{num_cached:,} of {num_prompt:,} prompt tokens",
            "finished": ", ".join(f"{count} by {reason}" for reason, count in reasons),
        }
        return "\n".join(f"{name:<14}{value}" for name, value in rows.items())


class TextView:
    """Prints text as it is generated.

    On a terminal, text is word-wrapped. Complete lines are printed once and scroll up; only the
    last, incomplete line is redrawn, with a progress bar below it if `stats` is given.
    """

    def __init__(self, stats: RunStats | None = None, num_prompts: int = 0) -> None:
        self._stats, self._num_prompts = stats, num_prompts
        self._open_line = ""
        self._live = None
        if sys.stdout.isatty():
            from rich import console, live

            self._live = live.Live(
                console=console.Console(),
                get_renderable=self._render,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
            )

    def __enter__(self) -> TextView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            print(self._open_line, end="", flush=True)

    def write(self, text: str, style: str = "") -> None:
        if self._live is None:
            print(text, end="", flush=True)
            return
        from rich.text import Text

        console = self._live.console
        text = self._open_line + printable(text)
        # Wrapping drops trailing spaces, which may separate the last word from the next piece.
        body = text.rstrip(" ")
        *lines, open_line = Text(body).wrap(console, console.width)
        for line in lines:
            console.print(line, style=style)
        self._open_line = open_line.plain + text[len(body) :]

    def _render(self) -> RenderableType:
        from rich import columns, console, progress_bar, text

        line = text.Text(self._open_line, no_wrap=True, overflow="crop")
        if self._stats is None:
            return line
        bar = progress_bar.ProgressBar(self._num_prompts, len(self._stats.outputs), width=20)
        status = columns.Columns([bar, self._stats.status(self._num_prompts)])
        return console.Group(line, status)


def printable(text: str) -> str:
    return text.translate(_CONTROLS)


def print_in_order(
    pieces: Iterable[StreamPiece],
    prompts: Sequence[str],
    stats: RunStats,
    has_headings: bool = True,
) -> list[RequestOutput]:
    """Print every completion under its prompt; return the outputs in the order of the prompts.

    Prompts that failed without any text are not printed.
    """
    outputs: list[RequestOutput] = []
    shown: set[int] = set()
    with TextView(stats, len(prompts)) as view:
        for piece in in_order(stats.count(pieces)):
            if piece.output is not None:
                outputs.append(piece.output)
                if piece.output.error is not None and not piece.output.text:
                    continue
            if has_headings and piece.index not in shown:
                prompt = textwrap.shorten(prompts[piece.index], MAX_HEADING, placeholder=" ...")
                view.write("\n" if shown else "")
                view.write(f"[{piece.index + 1}/{len(prompts)}] {prompt}\n", style="bold")
                shown.add(piece.index)
            view.write(piece.text + "\n" * piece.finished)
    return outputs


def in_order(pieces: Iterable[StreamPiece]) -> Iterator[StreamPiece]:
    """Yield pieces in the order of their prompts; buffer those of later prompts."""
    current, waiting = 0, defaultdict(list)
    for piece in pieces:
        waiting[piece.index].append(piece)
        while current in waiting:
            ready = waiting.pop(current)
            yield from ready
            if not ready[-1].finished:
                break
            current += 1


def why_empty(output: RequestOutput) -> str:
    """Explain why an output has no text."""
    if output.error is not None:
        return output.error
    end = "ended its output" if output.finish_reason == "stop" else "stopped"
    return f"no text: the model {end} after {len(output.token_ids)} blank or special tokens"
