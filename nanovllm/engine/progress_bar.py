"""The progress bar of `LLM.generate`: finished prompts, and tokens per second."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from tqdm import tqdm

from nanovllm.outputs import StreamPiece


def with_progress_bar(
    pieces: Generator[StreamPiece, None, None], num_prompts: int
) -> Generator[StreamPiece, None, None]:
    """Yield `pieces`, one per prompt, and show their progress; closing this closes `pieces`."""
    num_input = num_output = 0  # number of tokens of finished requests
    bar = tqdm(total=num_prompts, desc="Prompts", dynamic_ncols=True)
    with contextlib.closing(pieces), bar:
        for piece in pieces:
            assert piece.output is not None
            num_input += len(piece.output.prompt_token_ids)
            num_output += sum(len(each.token_ids) for each in piece.output.outputs)
            seconds = max(bar.format_dict["elapsed"], 1e-6)
            speeds = f"input {num_input / seconds:.0f} tok/s, output {num_output / seconds:.0f}"
            bar.set_postfix_str(f"{speeds} tok/s", refresh=False)
            bar.update()
            yield piece
