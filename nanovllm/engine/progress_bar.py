"""The progress bar of `LLM.generate`: finished prompts, and tokens per second."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from tqdm import tqdm

from nanovllm.outputs import StreamPiece


def with_progress_bar(
    steps: Generator[list[StreamPiece], None, None], num_prompts: int
) -> Generator[list[StreamPiece], None, None]:
    """Yield `steps` and show their progress; closing this generator closes `steps`."""
    num_input = num_output = 0  # number of tokens of finished requests
    bar = tqdm(total=num_prompts, desc="Prompts", dynamic_ncols=True)
    with contextlib.closing(steps), bar:
        for pieces in steps:
            outputs = [piece.output for piece in pieces if piece.output is not None]
            for output in outputs:
                num_input += len(output.prompt_token_ids)
                num_output += sum(len(each.token_ids) for each in output.outputs)
            seconds = max(bar.format_dict["elapsed"], 1e-6)
            speeds = f"input {num_input / seconds:.0f} tok/s, output {num_output / seconds:.0f}"
            bar.set_postfix_str(f"{speeds} tok/s", refresh=False)
            bar.update(len(outputs))
            yield pieces
