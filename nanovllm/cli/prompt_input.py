"""Where `nanovllm generate` gets its prompts: arguments, a file, a pipe."""

from __future__ import annotations

import os
import select
import stat
import sys
from dataclasses import dataclass

from nanovllm.errors import ConfigError

PATIENCE_SECONDS = 1.0  # before saying that stdin is what we wait for


@dataclass(frozen=True, slots=True)
class InputPrompt:
    text: str
    place: str  # for errors: "prompt 2", "stdin, line 7"


def read_prompts(arguments: list[str], file: str | None, by_lines: bool) -> list[InputPrompt]:
    """Return the prompts in their order: arguments, then the file, or else what stdin holds.

    An argument "-" stands for stdin. Without one, and without a file, piped text is appended to
    every argument; by lines, every argument is asked about every line.
    """
    # Arguments that are not UTF-8 arrive with surrogates, which no tokenizer takes.
    arguments = [os.fsencode(argument).decode(errors="replace") for argument in arguments]
    if not arguments and file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("no prompt: pass one or more, or --file PATH, or pipe text to stdin")
        arguments = ["-"]
    from_file = [] if file is None else _prompts_of(_read(file), file, by_lines)
    for number, argument in enumerate(arguments, start=1):
        if not argument.strip():
            raise ConfigError(f"no prompt: prompt {number} is empty")
    if "-" in arguments:
        piped = _prompts_of(_read(0), "stdin", by_lines)
        given = [piped if argument == "-" else [argument] for argument in arguments]
    elif arguments and file is None and _is_piped() and (text := _read(0)).strip():
        piped = _prompts_of(text, "stdin", by_lines)
        given = [[_append(argument, prompt) for prompt in piped] for argument in arguments]
    else:
        if by_lines and file is None:
            raise ConfigError("--lines needs --file PATH or text on stdin")
        given = [[argument] for argument in arguments]
    return [
        prompt if isinstance(prompt, InputPrompt) else InputPrompt(prompt, f"prompt {number}")
        for number, prompts in enumerate([*given, from_file], start=1)
        for prompt in prompts
    ]


def _prompts_of(text: str, source: str, by_lines: bool) -> list[InputPrompt]:
    """One prompt for all the text, or one for each line that has any."""
    if not text.strip():
        raise ConfigError(f"no prompt: {source} is empty")
    if not by_lines:
        return [InputPrompt(text, source)]
    lines = enumerate(text.split("\n"), start=1)
    return [InputPrompt(line, f"{source}, line {number}") for number, line in lines if line.strip()]


def _append(argument: str, piped: InputPrompt) -> InputPrompt:
    return InputPrompt(f"{argument}\n\n{piped.text}", piped.place)


def _is_piped() -> bool:
    """Whether something was put behind stdin for us: not a terminal, nor /dev/null, nor a socket.

    A server or a test runner may hand its own stdin down to us, open and silent; of these only
    pipes are read.
    """
    if sys.stdin is None:
        return False
    mode = os.fstat(0).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read(file: str | int) -> str:
    """Read a text to its end; line ends become newlines, and the last ones go."""
    try:
        if file == 0 and not select.select([0], [], [], PATIENCE_SECONDS)[0]:
            print("Waiting for text on stdin; Ctrl-D ends it ...", file=sys.stderr)
        with open(file, encoding="utf-8-sig", errors="replace", closefd=file != 0) as lines:
            return lines.read().rstrip("\n")
    except OSError as error:
        source = "stdin" if file == 0 else file
        raise ConfigError(f"cannot read prompts from {source}: {error.strerror}") from error
