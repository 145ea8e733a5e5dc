"""`example.py`, which `make demo` runs, and `examples/`."""

from __future__ import annotations

import re

import pytest

from tests.cli.terminal_process import ROOT, TerminalProcess, run_program


def test_it_uses_only_public_names() -> None:
    """A newcomer can copy it."""
    lines = (ROOT / "example.py").read_text().splitlines()
    assert [line for line in lines if "nanovllm" in line] == [
        "from nanovllm import LLM, SamplingParams"
    ]


@pytest.mark.slow
def test_the_demo_at_a_terminal() -> None:
    process = TerminalProcess("example.py", "--max-tokens", "24", columns=72)
    try:
        assert process.wait() == 0, process.text
    finally:
        process.close()
    question = process.text.index("[1/8] What is the capital of France?\n")
    assert process.text.index("The capital of France is Paris.\n") > question
    prompts, generated = process.text.rstrip().splitlines()[-2:]
    # Seven prompts share a block of 64 tokens.
    assert prompts == "prompts    8, 799 tokens, 448 from the prefix cache"
    assert generated.startswith("generated  ")


@pytest.mark.slow
def test_the_demo_in_a_pipe() -> None:
    """Runs on three ranks: the model has nine heads and three KV heads."""
    options = ["--model", "smollm2", "--max-tokens", "10", "--tensor-parallel-size", "3"]
    result = run_program("example.py", *options, timeout=1200)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.findall(r"^\[(\d)/8\]", result.stdout, re.M) == list("12345678")
    assert "The capital of France is Paris.\n" in result.stdout
    assert result.stdout.replace("\n", "").isprintable()


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
