"""Where `nanovllm generate` gets its prompts: arguments, a file, a pipe."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass

from nanovllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class InputPrompt:
    text: str
    place: str  # for errors: "prompt 2", "stdin, line 7"


def read_prompts(arguments: list[str], file: str | None, by_lines: bool) -> list[InputPrompt]:
    """Return the prompts in their order: arguments, then the file, or else stdin.

    An argument "-" stands for stdin. Without one, and without a file, piped text is appended to
    every argument; by lines, every argument is combined with every line.
    """
    # Arguments that are not UTF-8 arrive with surrogates, which no tokenizer takes.
    arguments = [os.fsencode(argument).decode(errors="replace") for argument in arguments]
    if not arguments and file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("no prompt: pass one or more, or --file PATH, or pipe text to stdin")
        arguments = ["-"]
    prompts: list[InputPrompt] = []
    for number, argument in enumerate(arguments, start=1):
        if not argument.strip():
            raise ConfigError(f"no prompt: prompt {number} is empty")
        prompts.append(InputPrompt(argument, f"prompt {number}"))
    if "-" in arguments:
        position = arguments.index("-")
        prompts[position : position + 1] = _split(_read(0), "stdin", by_lines)
    elif file is None and _is_piped() and (text := _read(0)).strip():
        piped = _split(text, "stdin", by_lines)
        prompts = [
            InputPrompt(f"{prompt.text}\n\n{each.text}", each.place)
            for prompt in prompts
            for each in piped
        ]
    elif file is None and by_lines:
        raise ConfigError("--lines needs --file PATH or text on stdin")
    return prompts + ([] if file is None else _split(_read(file), file, by_lines))


def _split(text: str, source: str, by_lines: bool) -> list[InputPrompt]:
    """Return one prompt for all the text, or one for each line that is not blank."""
    if not text.strip():
        raise ConfigError(f"no prompt: {source} is empty")
    if not by_lines:
        return [InputPrompt(text, source)]
    lines = enumerate(text.split("\n"), start=1)
    return [InputPrompt(line, f"{source}, line {number}") for number, line in lines if line.strip()]


def _is_piped() -> bool:
    """Whether stdin is a pipe or a file; an inherited stdin of another kind may never end."""
    if sys.stdin is None:
        return False
    mode = os.fstat(0).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read(file: str | int) -> str:
    """Read a text to its end; line ends become newlines, and the last ones go."""
    try:
        with open(file, encoding="utf-8-sig", errors="replace", closefd=file != 0) as lines:
            return lines.read().rstrip("\n")
    except OSError as error:
        source = "stdin" if file == 0 else file
        raise ConfigError(f"cannot read prompts from {source}: {error.strerror}") from error
