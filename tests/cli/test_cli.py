"""The command line as a user meets it: real processes, pipes and a real terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm import __version__
from nanovllm.checkpoint.find import ALIASES
from nanovllm.cli import build_parser
from nanovllm.cli.chat import Conversation
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import dashed, engine_config, sampling_params
from nanovllm.config import EngineConfig
from nanovllm.errors import CheckpointError, ConfigError, RequestError
from nanovllm.models.registry import FAMILIES
from nanovllm.outputs import StreamPiece
from nanovllm.sampling_params import SamplingParams
from tests.cli.terminal_process import ROOT, TerminalProcess, run_program


def nanovllm(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_program("-m", "nanovllm", *arguments, stdin=stdin)


def test_version() -> None:
    result = nanovllm("--version")
    assert (result.returncode, result.stdout) == (0, f"nanovllm {__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["generate", "-h"],
        ["chat", "--help"],
        ["bench", "-h"],
        ["bench", "latency", "-h"],
        ["models", "-h"],
    ],
)
def test_help_teaches_without_loading_torch(arguments: list[str]) -> None:
    script = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["numpy"] = None
from nanovllm.cli import main
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "examples:\n  nanovllm " in result.stdout


def test_every_option_states_its_default() -> None:
    names = ("throughput", "latency", "prefill", "prefix")
    for command in ("generate", "chat", *(f"bench {name}" for name in names)):
        for paragraph in nanovllm(*command.split(), "--help").stdout.split("\n  --")[1:]:
            name, text = paragraph.split(maxsplit=1)
            is_input = name in ("file", "json")
            assert is_input or "(default:" in text, f"{command} --{name}"


def test_options_reach_the_engine() -> None:
    arguments = "generate x --model m --max_num_seqs 3 --kvcache-block-size=16 --no-prefix-caching"
    arguments += " --revision v2"
    sampling = "--max_tokens=9 --top-k 5 --stop A_B --stop c --ignore_eos --seed -1"
    args = build_parser().parse_args(dashed(f"{arguments} {sampling}".split()))
    assert engine_config(args) == EngineConfig(
        "m", revision="v2", max_num_seqs=3, kvcache_block_size=16, enable_prefix_caching=False
    )
    assert sampling_params(args) == SamplingParams(
        temperature=0.0, max_tokens=9, top_k=5, stop=["A_B", "c"], ignore_eos=True, seed=-1
    )


def test_underscores_are_dashes_in_names_only() -> None:
    given = ["a_b", "--max_tokens", "c_d", "--stop=e_f", "-x_y", "--", "--g_h"]
    assert dashed(given) == ["a_b", "--max-tokens", "c_d", "--stop=e_f", "-x_y", "--", "--g_h"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "x", "--dtype", "int8"], 2, "dtype must be 'auto' or one of"),
        (["generate", "x", "--top-p", "2"], 2, "top_p must be in (0, 1]"),
        (["generate", "--file", "/no/such/file"], 2, "/no/such/file: No such file or directory"),
        (["generate"], 2, "no prompt: stdin is empty"),
        (["chat", "--max-num-seqs", "0"], 2, "max_num_seqs must be at least 1, got 0"),
        (["generate", "x", "--model", "no-such-model"], 1, "no model 'no-such-model'"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, message: str) -> None:
    result = nanovllm(*arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith("nanovllm: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["generate", "--no-such-option"], ["fly"], ["chat", "x"]])
def test_wrong_usage_is_short(arguments: list[str]) -> None:
    result = nanovllm(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: nanovllm ")
    assert len(result.stderr.splitlines()) <= 3


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a\n b"), 2), (RequestError("a\n b"), 1), (CheckpointError("a\n b"), 1)],
)
def test_exit_codes(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: raise_(error)) == code
    assert capsys.readouterr().err == "nanovllm: error: a b\n"


def test_ctrl_c_ends_a_program_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: raise_(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "\n"


def test_a_reader_that_leaves_is_no_error_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = """
import sys
from nanovllm.cli.exit_code import exit_code
sys.exit(exit_code(lambda: print("an answer") or 0))
"""
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert (process.communicate()[1], process.returncode) == (b"", 1)


def test_generate_answers_every_line_of_stdin_as_json() -> None:
    prompts = ["The capital of France is", "2, 4, 6, 8,"]
    stdin = "\n".join([prompts[0], "", prompts[1]])
    result = nanovllm("generate", "--json", "--max_tokens", "6", "-v", stdin=stdin)
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert "Paris" in answers[0]["text"]
    assert "10" in answers[1]["text"]
    for answer in answers:
        assert list(answer) == ["prompt", "text", "token_ids", "finish_reason"]
        assert (len(answer["token_ids"]), answer["finish_reason"]) == (6, "length")
    assert "INFO: Loaded " in result.stderr


def test_models_lists_every_architecture_and_short_name() -> None:
    shown, as_json = nanovllm("models"), nanovllm("models", "--json")
    assert (shown.returncode, shown.stderr) == (as_json.returncode, as_json.stderr) == (0, "")
    records = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [record["architecture"] for record in records] == list(FAMILIES)
    short_names: dict[str, str] = {}
    expected: list[str] = []
    for record in records:
        assert record["examples"]
        short_names |= record["short_names"]
        expected += [record["architecture"], *(f"  {example}" for example in record["examples"])]
    assert short_names == {alias: hub_id for alias, (hub_id, _) in ALIASES.items()}
    lines = shown.stdout.splitlines()
    assert [line.partition(", short: ")[0] for line in lines] == expected
    for alias, hub_id in short_names.items():
        assert f"  {hub_id}, short: {alias}" in lines


def test_chat_in_a_pipe_prints_answers_only() -> None:
    """A conversation remembers, and /reset makes it forget; the same question, the same answer."""
    question = "What is the capital of France? Answer in one word."
    lines = [question, "And of Italy?", "/reset", question, "/exit", "Never asked."]
    result = nanovllm("chat", "--temperature", "0", "--max-tokens", "8", stdin="\n".join(lines))
    assert (result.returncode, result.stderr) == (0, "")
    answers = result.stdout.splitlines()
    assert "Paris" in answers[0]
    assert "Rome" in answers[1]
    assert answers[2:] == answers[:1]


@pytest.fixture
def chat() -> Iterator[TerminalProcess]:
    options = ["--ignore-eos", "--max-tokens", "3000"]
    process = TerminalProcess("-m", "nanovllm", "chat", *options)
    yield process
    process.close()


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat: TerminalProcess) -> None:
    for question in ("Tell me a story.", "Tell me another one."):
        chat.wait_for(lambda text: text.endswith("> "))
        chat.send(question + "\n")
        chat.wait_for(lambda text, q=question: len(text.partition(q + "\n")[2]) > 20)  # type: ignore[misc]
        chat.send("\x03")
    chat.wait_for(lambda text: text.endswith("> "))
    chat.send("/help\n")
    chat.wait_for(lambda text: "forget the conversation" in text and text.endswith("> "))
    chat.send("\x04")
    assert chat.wait() == 0
    assert "Traceback" not in chat.text
    assert "KeyboardInterrupt" not in chat.text


class FakeLLM:
    """Answers every conversation with the same pieces; remembers whether a stream was closed."""

    def __init__(self, *texts: str, error: RequestError | None = None) -> None:
        self.texts = texts
        self.error = error
        self.num_closed = 0

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[list[int]]:
        return [[len(messages)]]

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[StreamPiece]:
        if self.error is not None:
            raise self.error
        try:
            for text in self.texts:
                yield StreamPiece(0, text, [1], None)
        finally:
            self.num_closed += 1


def converse(llm: FakeLLM, system: str | None = None) -> Conversation:
    return Conversation(llm, SamplingParams(), system)  # type: ignore[arg-type]


def test_a_stopped_answer_stays_in_the_history() -> None:
    llm, shown = FakeLLM("one", " two", " three"), []
    conversation = converse(llm)
    conversation.ask("Count.", shown.append, is_stopped=lambda: len(shown) == 2)
    assert shown == ["one", " two"]
    assert conversation.messages[-1] == {"role": "assistant", "content": "one two"}
    assert llm.num_closed == 1


def test_reset_keeps_the_system_prompt_only() -> None:
    conversation = converse(FakeLLM("yes"), system="Be brief.")
    conversation.ask("Well?", no_show, is_stopped=lambda: False)
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_a_question_that_does_not_fit_leaves_no_trace() -> None:
    conversation = converse(FakeLLM(error=RequestError("too long")))
    with pytest.raises(RequestError, match="too long"):
        conversation.ask("A long one.", no_show, is_stopped=lambda: False)
    assert conversation.messages == []


def no_show(text: str) -> None:
    pass


def raise_(error: BaseException) -> int:
    raise error
