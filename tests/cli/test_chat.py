"""`nanovllm chat` with a fake model: turns, commands and the history."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from nanovllm.cli.chat import Conversation, converse, run_command, talk
from nanovllm.errors import PromptTooLongError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from tests.cli.fake_llm import FakeLLM


def new_conversation(llm: FakeLLM, system: str | None = None) -> Conversation:
    return Conversation(llm, SamplingParams(), system)  # type: ignore[arg-type]


def ask(conversation: Conversation, question: str) -> str:
    shown: list[str] = []
    conversation.ask(question, shown.append)
    return "".join(shown)


def say(conversation: Conversation, lines: str) -> None:
    """Send lines to a chat, as a pipe does."""
    file = io.StringIO(lines)
    converse(conversation, lambda prompt: next(file, None))


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


def test_a_stopped_reply_stays_in_the_history() -> None:
    llm, shown = FakeLLM("one", " two", " three"), []
    conversation = new_conversation(llm)

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask("Count.", show)
    assert shown == ["one", " two"]
    assert conversation.messages[-1] == {"role": "assistant", "content": "one two"}
    assert llm.num_closed == 1


def test_a_question_stopped_before_its_reply_is_forgotten() -> None:
    conversation = new_conversation(FakeLLM("one"))
    conversation.stats.count = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("A long one.", lambda text: None)
    assert conversation.messages == []


def test_reset_keeps_the_system_prompt_only() -> None:
    conversation = new_conversation(FakeLLM("yes"), system="Be brief.")
    ask(conversation, "Well?")
    assert roles(conversation) == ["system", "user", "assistant"]
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize("question", ["bad", "odd"])
def test_a_question_that_does_not_fit_leaves_no_trace(question: str) -> None:
    conversation = new_conversation(FakeLLM("yes"))
    with pytest.raises(RequestError):
        ask(conversation, question)
    assert conversation.messages == []


def questions(text: str) -> list[str]:
    """Return the questions that a chat receives when these lines are typed."""
    conversation = new_conversation(FakeLLM("yes"))
    say(conversation, text)
    return [each["content"] for each in conversation.messages if each["role"] == "user"]


def test_lines_are_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert questions('one\n\n  /set seed 1 \nsay "hi"\n') == ["one", 'say "hi"']
    assert capsys.readouterr().out == "yes\nyes\n"


def test_quotes_make_one_turn_of_several_lines() -> None:
    assert questions('"""\none\n  two\n\nexit\n"""\nnext\n') == ["one\n  two\n\nexit", "next"]
    assert questions('"""/one line"""\n"""two\nlines"""\n') == ["/one line", "two\nlines"]
    assert questions('"""\nno end\n') == ["no end"]
    assert questions('""""""\n"""\n"""\n') == []


@pytest.mark.parametrize("farewell", ["/exit", "/bye", "/quit", "exit", "quit", " Exit "])
def test_farewells(farewell: str) -> None:
    assert questions(f"one\n{farewell}\nnever\n") == ["one"]


def test_system_changes_the_instructions(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = new_conversation(FakeLLM("yes"))
    run_command("/system", conversation)
    assert capsys.readouterr().err == "No system prompt except the chat template's own.\n"
    ask(conversation, "Well?")
    run_command("/system Be brief.", conversation)
    run_command("/system Be very brief.", conversation)
    assert roles(conversation) == ["system", "user", "assistant"]
    run_command("/system", conversation)
    assert capsys.readouterr().err == "Be very brief.\n"
    run_command("/reset", conversation)
    assert conversation.messages == [{"role": "system", "content": "Be very brief."}]


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("temperature 0.8", {"temperature": 0.8}),
        ("max_tokens 7", {"max_tokens": 7}),
        ("seed 3", {"seed": 3}),
        ("seed none", {"seed": None}),
        ("ignore_eos on", {"ignore_eos": True}),
        ("stop The end", {"stop": ("The end",)}),
        ("stop", {"stop": ()}),
        ("stop_token_ids 5 6", {"stop_token_ids": (5, 6)}),
        ("stop_token_ids", {"stop_token_ids": ()}),
        ("allowed_token_ids 5 6", {"allowed_token_ids": (5, 6)}),
        ("allowed_token_ids none", {"allowed_token_ids": None}),
    ],
)
def test_set_changes_the_parameters(line: str, changes: dict[str, Any]) -> None:
    llm = FakeLLM("yes")
    conversation = new_conversation(llm)
    run_command(f"/set {line}", conversation)
    ask(conversation, "Well?")
    assert llm.params == SamplingParams(**changes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set heat 1", "/set: there is no parameter heat; the parameters are temperature, "),
        (
            "/set n 2",
            "/set: there is no parameter n; the parameters are ",
        ),  # a chat shows one reply
        (
            "/set logprobs 2",
            "/set: there is no parameter logprobs; the parameters are temperature, ",
        ),
        ("/set temperature hot", "/set: temperature must be of type float, got 'hot'"),
        ("/set temperature", "/set: temperature must be of type float, got ''"),
        ("/set max_tokens 0", "/set: max_tokens must be at least 1, or 0 with"),
        ("/set stop_token_ids x", "/set: stop_token_ids must be items of type int"),
        ("/fly high", "/fly: there is no such command; /help lists them"),
        ("/save", "/save: "),
        ("/load", "/load: "),
        ("/load /no/such/file", "/load: [Errno 2] No such file or directory: '/no/such/file'"),
        ("/save /no/such/folder/file", "/save: [Errno 2] No such file or directory: "),
        ("/retry", "/retry: there is no reply to generate again"),
    ],
)
def test_commands_report_errors(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = new_conversation(FakeLLM("yes"))
    before = conversation.params
    run_command(line, conversation)
    assert capsys.readouterr().err.startswith(message)
    assert conversation.params == before


def test_set_and_help_list_parameters_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = new_conversation(FakeLLM("yes"))
    run_command("/set", conversation)
    shown = capsys.readouterr().err
    assert "temperature         1.0\n" in shown
    assert "include_stop_str_in_output False\n" in shown
    run_command("/help", conversation)
    assert "/save FILE" in capsys.readouterr().err


def test_a_conversation_is_saved_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat with é.json"
    conversation = new_conversation(FakeLLM("yés"), system="Be brief.")
    ask(conversation, "Well?")
    run_command(f"/save {path}", conversation)
    other = new_conversation(FakeLLM("no"))
    run_command(f"/load {path}", other)
    assert other.messages == conversation.messages == json.loads(path.read_text("utf-8"))
    assert other.system == "Be brief."
    assert (
        capsys.readouterr().err == f"Saved 3 messages to {path}.\nLoaded 3 messages from {path}.\n"
    )


def test_save_reports_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation, path = new_conversation(FakeLLM("half: \ud800")), tmp_path / "chat.json"
    run_command(f"/save {path}\0b", conversation)
    assert "embedded null byte" in capsys.readouterr().err
    path.write_text("kept")
    ask(conversation, "Well?")
    run_command(f"/save {path}", conversation)
    assert "surrogates not allowed" in capsys.readouterr().err
    assert path.read_text() == "kept"


class SmallContext(FakeLLM):
    """A model whose prompts join all messages, with one token per character."""

    def __init__(self, max_len: int, is_refusing: bool) -> None:
        super().__init__("yes")
        self._max_len = max_len
        if not is_refusing:
            self.engine.core.max_len = max_len

    def apply_chat_template(self, messages: list[Any]) -> list[str]:
        return ["".join(message["content"] for message in messages[0])]

    def stream(self, prompts: Any, *args: Any, **options: Any) -> Iterator[Any]:
        if len(prompts[0]) >= self._max_len:
            raise PromptTooLongError("the prompt is too long")
        yield from super().stream(prompts, *args, **options)


@pytest.mark.parametrize("is_refusing", [False, True], ids=["no room", "refused"])
def test_the_oldest_turns_make_room(is_refusing: bool, capsys: pytest.CaptureFixture[str]) -> None:
    llm = SmallContext(60, is_refusing)
    conversation = new_conversation(llm, system="S" * 10)
    for letter in "abcdef":
        say(conversation, letter * 15)
    kept = [message["content"][:1] for message in conversation.messages]
    assert kept[:1] + kept[-2:] == ["S", "f", "y"]
    assert "b" not in kept
    assert "[the context is full: dropped the oldest 2 messages]" in capsys.readouterr().err
    before = conversation.messages
    with pytest.raises(PromptTooLongError):
        ask(conversation, "z" * 60)
    assert conversation.messages == before


def test_a_reply_that_is_cut_off_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM("one", finish_reason="length")
    conversation = new_conversation(llm)
    conversation.params = SamplingParams(max_tokens=1)
    say(conversation, "Well?")
    expected = "[cut off after 1 tokens: max_tokens is 1; /set max_tokens 2 allows more]\n"
    assert capsys.readouterr().err == expected
    conversation.params = SamplingParams(max_tokens=65)
    say(conversation, "Well?")
    assert capsys.readouterr().err == "[cut off after 1 tokens: the context is full]\n"


def test_retry_generates_the_last_reply_again(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM("yes")
    conversation = new_conversation(llm)
    say(conversation, "One?\nTwo?\n/retry\n")
    assert capsys.readouterr().out == "yes\n" * 3
    assert [message["content"] for message in llm.conversations[0]] == ["One?", "yes", "Two?"]
    assert roles(conversation) == ["user", "assistant"] * 2
    before = conversation.messages
    conversation.stats.count = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        conversation.retry(lambda text: None)
    assert conversation.messages == before
    with pytest.raises(RequestError, match="no reply to generate again"):
        new_conversation(llm).retry(lambda text: None)


NO_CONVERSATIONS = ["{", "[]", '[{"role": "user"}]', '"x"', "[[[]]]", "\xff", "[" * 99_999]


@pytest.mark.parametrize("content", NO_CONVERSATIONS, ids=lambda content: content[:20])
def test_files_without_a_conversation(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content.encode("latin-1"))
    conversation = new_conversation(FakeLLM("yes"))
    ask(conversation, "Well?")
    run_command(f"/load {tmp_path}/file", conversation)
    assert "/load: " in capsys.readouterr().err
    assert roles(conversation) == ["user", "assistant"]


def test_stats_count_all_replies(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = new_conversation(FakeLLM("one", "two"))
    ask(conversation, "Well?")
    ask(conversation, "And?")
    run_command("/stats", conversation)
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines())
    assert rows["prompts"] == "2, 4 tokens"
    assert rows["generated"].startswith("4 tokens in ")
    assert rows["finished"] == "2 by stop"


def typed(keys: str) -> list[str]:
    """Return the questions that a chat at a terminal receives when these keys are pressed."""
    conversation = new_conversation(FakeLLM("yes"))
    with create_pipe_input() as keyboard, create_app_session(keyboard, DummyOutput()):
        keyboard.send_text(keys)
        talk(conversation)
    return [each["content"] for each in conversation.messages if each["role"] == "user"]


LEAVE = "\x04"  # Ctrl-D


def test_pasted_lines_are_one_message() -> None:
    pasted = "\x1b[200~one\ntwo\n\nthree\x1b[201~ four\r"
    assert typed(pasted + LEAVE) == ["one\ntwo\n\nthree four"]
    assert typed('"""\rfive\rsix"""\rexit\r') == ["five\nsix"]


def test_lines_can_be_edited() -> None:
    left = "\x1b[D"
    assert typed(f"oe{left}n\r{LEAVE}") == ["one"]


def test_an_interrupt_discards_a_message_of_several_lines_or_leaves() -> None:
    assert typed('"""half\r\x03"""whole"""\r\x03never\r') == ["whole"]


def test_an_interrupt_stops_a_reply_and_not_the_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Conversation):
        def ask(self, question: str, show: Callable[[str], None]) -> RequestOutput:
            if question == "slow":
                raise KeyboardInterrupt
            if question == "bad":
                raise RequestError("the prompt is too long")
            return super().ask(question, show)

    monkeypatch.setattr("tests.cli.test_chat.Conversation", Slow)
    assert typed(f"slow\rbad\rquick\r{LEAVE}") == ["quick"]
    shown = capsys.readouterr().out
    assert "[stopped]" in shown
    assert "the prompt is too long. /reset starts a new conversation." in shown
