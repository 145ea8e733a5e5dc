"""`example.py`, which `make demo` runs, in a terminal and in a pipe; `examples/`."""

from __future__ import annotations

import re

import pytest

from tests.cli.terminal_process import TerminalProcess, run_program


@pytest.mark.slow
def test_the_demo_at_a_terminal() -> None:
    process = TerminalProcess("example.py", "--max-tokens", "24", columns=72)
    try:
        assert process.wait() == 0, process.text
    finally:
        process.close()
    assert "0/8 " in process.text
    question = process.text.index("[1/8] What is the capital of France?")
    assert process.text.index("The capital of France is Paris.") > question
    rows = process.text.rstrip().splitlines()
    assert rows[-6].startswith("prompts       8, ")
    # Seven prompts share a block of 64 tokens.
    assert rows[-2] == "prefix cache  448 of 799 prompt tokens"


@pytest.mark.slow
def test_the_demo_in_a_pipe() -> None:
    """Runs on three ranks: the model has nine heads and three KV heads."""
    options = ["--model", "smollm2", "--max_tokens", "10", "--tensor-parallel-size", "3"]
    result = run_program("example.py", *options, timeout=1200)
    assert (result.returncode, result.stderr) == (0, "")
    assert "The capital of France is Paris.\n" in result.stdout
    assert result.stdout.replace("\n", "").isprintable()
    assert "generated " in result.stdout


@pytest.mark.slow
def test_three_sequences_in_eight_blocks() -> None:
    result = run_program("examples/step_by_step.py", timeout=1200)
    assert (result.returncode, result.stderr) == (0, "")
    steps = [text.splitlines() for text in result.stdout.split("\nStep ")[1:]]
    assert [int(lines[0]) for lines in steps] == list(range(1, len(steps) + 1))
    happened: dict[tuple[str, str], int] = {}  # the step in which each change was made first
    for number, lines in enumerate(steps):
        for kind, name in re.findall(r"^  (\w+) +([ABC]): ", "\n".join(lines), re.MULTILINE):
            happened.setdefault((kind, name), number)
    assert happened["admitted", "A"] == happened["shared", "B"] == 0
    preempted, admitted_again = happened["preempted", "C"], happened["shared", "C"]
    assert happened["admitted", "C"] < preempted < admitted_again < happened["finished", "C"]
    assert any("decode, position" in line for line in steps[preempted])
    assert re.search(r"  C +preempted", "\n".join(steps[preempted]))
    assert steps[-1][-1].startswith("  freed      C: blocks")
