"""`nanovllm generate` with a fake model: prompts, output and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm.cli import main, start
from tests.cli.fake_llm import FakeLLM

pytestmark = pytest.mark.usefixtures("nothing")


def run(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM, *arguments: str) -> int:
    def load(config: Any, num_threads: int | None) -> FakeLLM:
        return llm

    monkeypatch.setattr(start, "load_llm", load)
    return main(["generate", *arguments])


def test_instruct_models_use_their_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM("Rayleigh", " scattering.")
    assert run(monkeypatch, llm, "Why?") == 0
    assert llm.conversations == [[{"role": "user", "content": "Why?"}]]
    assert llm.prompts == ["<Why?>"]
    output = capsys.readouterr()
    assert output.out == "Rayleigh scattering.\n"
    assert output.err.startswith("\nprompts       1, ")


@pytest.mark.parametrize(
    ("arguments", "model", "prompts"),
    [
        (["Qwen/Qwen3-0.6B", "Why?"], "Qwen/Qwen3-0.6B", ["Why?"]),
        (["SmolLM2", "Why?", "How?"], "SmolLM2", ["Why?", "How?"]),
        (["smollm2"], "smollm2", ["smollm2"]),  # a single argument is a prompt
        (["Why?", "smollm2"], "smollm2", ["Why?", "smollm2"]),
        (["--model", "m.gguf", "qwen3", "Why?"], "m.gguf", ["qwen3", "Why?"]),
    ],
)
def test_the_first_argument_may_be_the_model(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], model: str, prompts: list[str]
) -> None:
    llm, models = FakeLLM("yes"), []

    def load(config: Any, num_threads: int | None) -> FakeLLM:
        models.append(config.model)
        return llm

    monkeypatch.setattr(start, "load_llm", load)
    assert main(["generate", *arguments, "--raw"]) == 0
    assert (models, llm.prompts) == ([model], prompts)


def test_a_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM("yes")
    run(monkeypatch, llm, "--system", "Be brief.", "Why?")
    assert [message["role"] for message in llm.conversations[0]] == ["system", "user"]


@pytest.mark.parametrize(
    ("llm", "options"),
    [(FakeLLM(" blue."), ["--raw"]), (FakeLLM(" blue.", has_template=False), [])],
    ids=["raw", "base model"],
)
def test_texts_are_continued_without_a_template(
    monkeypatch: pytest.MonkeyPatch, llm: FakeLLM, options: list[str]
) -> None:
    assert run(monkeypatch, llm, "The sky is", *options) == 0
    assert (llm.conversations, llm.prompts) == ([], ["The sky is"])


def test_a_system_prompt_needs_a_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM("x", has_template=False)
    assert run(monkeypatch, llm, "--system", "s", "x") == 2
    assert "--system needs a chat template, and this model has none" in capsys.readouterr().err


def test_an_empty_output_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, FakeLLM(""), "Why?") == 0
    output = capsys.readouterr()
    assert output.out == "\n"
    assert output.err.startswith("prompt 1: no text: the model ended its output after 1 blank")


def test_a_refused_prompt_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, FakeLLM("yes"), "first", "a bad one", "third") == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("nanovllm generate: error: prompt 2: t")
    assert output.err.endswith(" (--keep-going runs the other prompts)\n")


def test_keep_going_runs_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["bad", "first", "bad", "bad", "second", "bad"]
    assert run(monkeypatch, FakeLLM("yes"), "--keep-going", *prompts) == 1
    output = capsys.readouterr()
    assert output.out == "[2/6] first\nyes\n\n[5/6] second\nyes\n"
    lines = output.err.splitlines()[-4:]
    assert [line.removeprefix("nanovllm generate: error: ") for line in lines] == [
        "prompt 1: too long",
        "prompt 3: too long",
        "prompt 4: too long",
        "prompt 6: too long",
    ]


@pytest.mark.parametrize("prompts", [["bad", "good", "bad"], ["bad", "bad"], ["good", "bad"]])
def test_json_has_a_line_for_every_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompts: list[str]
) -> None:
    assert run(monkeypatch, FakeLLM("yes"), "--keep-going", "--json", *prompts) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    for line in lines:
        is_good = line["prompt"] == "good"
        names = ["text", "token_ids", "finish_reason"] if is_good else ["error"]
        assert list(line) == ["prompt", *names]


def test_messages_that_the_template_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, FakeLLM("yes"), "--keep-going", "an odd one", "another") == 1
    assert capsys.readouterr().err.endswith("error: the chat template refused the messages\n")


def test_one_refused_prompt_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, FakeLLM("yes"), "bad") == 1
    assert capsys.readouterr().err == "nanovllm generate: error: too long\n"


def test_an_output_that_ends_with_an_error_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, FakeLLM("so"), "a", "a broken one") == 1
    assert "nanovllm generate: error: prompt 2: logits are NaN\n" in capsys.readouterr().err
    assert run(monkeypatch, FakeLLM("so"), "--json", "a broken one") == 1
    line = json.loads(capsys.readouterr().out)
    assert (line["text"], line["finish_reason"], line["error"]) == ("so", "error", "logits are NaN")


def test_a_schema_from_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "null"}', encoding="utf-8")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    llm = FakeLLM("null")
    assert run(monkeypatch, llm, "--json-schema", str(tmp_path / "schema.json"), "x") == 0
    assert llm.params is not None
    assert llm.params.structured_outputs == {"json": {"type": "null"}}
    for name in ("broken.json", "missing.json"):
        assert run(monkeypatch, FakeLLM("x"), "--json-schema", str(tmp_path / name), "x") == 2
    assert "missing.json: " in capsys.readouterr().err
