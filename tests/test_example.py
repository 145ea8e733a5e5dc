"""Run `example.py`, as `make demo` does, and the programs in `examples/`."""

from __future__ import annotations

import re

import pytest

from tests.cli.terminal_process import ROOT, TerminalProcess, run_program


def test_it_uses_only_public_names() -> None:
    """Newcomers can copy the program."""
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
    result = run_program("example.py", "--model", "smollm2", "--max-tokens", "10", timeout=1200)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.findall(r"^\[(\d)/8\]", result.stdout, re.M) == list("12345678")
    assert "The capital of France is Paris.\n" in result.stdout
    assert result.stdout.replace("\n", "").isprintable()


@pytest.mark.slow
def test_three_sequences_in_eight_blocks() -> None:
    result = run_program("examples/step_by_step.py", timeout=1200)
    assert (result.returncode, result.stderr) == (0, "")
    *steps, texts = re.split(r"\n(?=Steps? \d|Texts)", result.stdout)[1:]
    spans = [list(map(int, re.findall(r"\d+", step.splitlines()[0]))) for step in steps]
    numbers = [number for span in spans for number in range(span[0], span[-1] + 1)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(steps) < len(numbers)  # uneventful steps are printed together
    happened: dict[tuple[str, str], int] = {}  # the part in which each change was printed first
    for index, step in enumerate(steps):
        for kind, name in re.findall(r"^  (\w+) +([ABC]): ", step, re.MULTILINE):
            happened.setdefault((kind, name), index)
    assert happened["admitted", "A"] == happened["shared", "B"] == 0
    assert "B: blocks 0 1 (filled in this step)" in steps[0]
    preempted, admitted_again = happened["preempted", "C"], happened["shared", "C"]
    assert happened["admitted", "C"] < preempted < admitted_again < happened["finished", "C"]
    assert "decode, position" in steps[preempted]
    assert re.search(r"  C +preempted", steps[preempted])
    assert re.search(r"  C +running .* recompute, positions", steps[admitted_again])
    for name in "ABC":
        last = steps[happened["finished", name]]
        assert re.search(rf"  {name} +finished .* decode, position \d+ +'", last)
    assert steps[-1].splitlines()[-1].startswith("  freed      C: blocks")
    assert "' -> ' Germany." in texts
