"""`nanovllm chat` around a model that is not there: turns, commands, what is remembered."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.cli.chat import _explain, answer_pipe, read_turns
from nanovllm.cli.chat_commands import obey
from nanovllm.cli.conversation import Conversation
from nanovllm.errors import PromptTooLongError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from tests.cli.fake_llm import FakeLLM
from tests.cli.terminal_process import TerminalProcess


def converse(llm: FakeLLM, system: str | None = None) -> Conversation:
    return Conversation(llm, SamplingParams(), system)  # type: ignore[arg-type]


def ask(conversation: Conversation, question: str) -> str:
    shown: list[str] = []
    conversation.ask(question, shown.append)
    return "".join(shown)


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


def test_a_stopped_answer_stays_in_the_history() -> None:
    llm, shown = FakeLLM("one", " two", " three"), []
    conversation = converse(llm)

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask("Count.", show)
    assert shown == ["one", " two"]
    assert conversation.messages[-1] == {"role": "assistant", "content": "one two"}
    assert llm.num_closed == 1


def test_a_question_that_was_stopped_before_its_answer_is_forgotten() -> None:
    llm = FakeLLM("one")
    conversation = converse(llm)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    conversation.stats.add_step = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("A long one.", interrupt)
    assert llm.num_closed == 1
    assert conversation.messages == []


def test_reset_keeps_the_system_prompt_only() -> None:
    conversation = converse(FakeLLM("yes"), system="Be brief.")
    ask(conversation, "Well?")
    assert roles(conversation) == ["system", "user", "assistant"]
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize("question", ["bad", "odd"])
def test_a_question_that_does_not_fit_leaves_no_trace(question: str) -> None:
    conversation = converse(FakeLLM("yes"))
    with pytest.raises(RequestError):
        ask(conversation, question)
    assert conversation.messages == []


def turns(text: str) -> list[tuple[str, bool]]:
    lines = io.StringIO(text)
    return [(t.text, t.is_command) for t in read_turns(lambda prompt: next(lines, None))]


def test_lines_are_turns() -> None:
    assert turns('one\n\n  /set x \nsay "hi"\n') == [
        ("one", False),
        ("/set x", True),
        ('say "hi"', False),
    ]


def test_quotes_make_one_turn_of_several_lines() -> None:
    assert turns('"""\none\n  two\n\nexit\n"""\nnext\n') == [
        ("one\n  two\n\nexit", False),
        ("next", False),
    ]
    assert turns('"""/one line"""\n"""two\nlines"""\n') == [
        ("/one line", False),
        ("two\nlines", False),
    ]
    assert turns('"""\nno end\n') == [("no end", False)]
    assert turns('""""""\n"""\n"""\n') == []


@pytest.mark.parametrize("farewell", ["/exit", "/bye", "/quit", "exit", "quit", " Exit "])
def test_farewells(farewell: str) -> None:
    assert turns(f"one\n{farewell}\nnever\n") == [("one", False)]


def test_system_changes_the_instructions(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = converse(FakeLLM("yes"))
    obey("/system", conversation)
    assert capsys.readouterr().err == "No instructions beside the model's own.\n"
    ask(conversation, "Well?")
    obey("/system Be brief.", conversation)
    obey("/system Be very brief.", conversation)
    assert roles(conversation) == ["system", "user", "assistant"]
    obey("/system", conversation)
    assert capsys.readouterr().err == "Be very brief.\n"
    obey("/reset", conversation)
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
    conversation = converse(llm)
    obey(f"/set {line}", conversation)
    ask(conversation, "Well?")
    assert llm.params == SamplingParams(**changes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set heat 1", "There is no parameter heat; there are temperature, "),
        ("/set n 2", "There is no parameter n; there are temperature, "),  # one answer is shown
        ("/set logprobs 2", "There is no parameter logprobs; there are temperature, "),
        ("/set temperature hot", "temperature must be of type float, got 'hot'"),
        ("/set temperature", "temperature must be of type float, got ''"),
        ("/set max_tokens 0", "max_tokens must be at least 1, or 0 with prompt_logprobs, got 0"),
        ("/set stop_token_ids x", "stop_token_ids must be items of type int"),
        ("/fly high", "There is no command /fly; /help lists them"),
        ("/save", "/save needs the name of a file."),
        ("/load", "/load needs the name of a file."),
        ("/load /no/such/file", "cannot load /no/such/file: No such file or directory"),
        ("/save /no/such/folder/file", "cannot save to /no/such/folder/file: No such file"),
    ],
)
def test_what_cannot_be_done_is_said(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = converse(FakeLLM("yes"))
    before = conversation.params
    obey(line, conversation)
    assert capsys.readouterr().err.startswith(message)
    assert conversation.params == before


def test_set_and_help_show_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = converse(FakeLLM("yes"))
    obey("/set", conversation)
    shown = capsys.readouterr().err
    assert "temperature         1.0\n" in shown
    assert "include_stop_str_in_output False\n" in shown
    obey("/help", conversation)
    assert "/save FILE" in capsys.readouterr().err


def test_a_conversation_is_saved_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat with é.json"
    conversation = converse(FakeLLM("yés"), system="Be brief.")
    ask(conversation, "Well?")
    obey(f"/save {path}", conversation)
    other = converse(FakeLLM("no"))
    obey(f"/load {path}", other)
    assert other.messages == conversation.messages == json.loads(path.read_text("utf-8"))
    assert other.system == "Be brief."
    assert (
        capsys.readouterr().err == f"Saved 3 messages to {path}.\nLoaded 3 messages from {path}.\n"
    )


def test_what_cannot_be_saved_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation, path = converse(FakeLLM("half: \ud800")), tmp_path / "chat.json"
    obey(f"/save {path}\0b", conversation)
    assert "embedded null byte" in capsys.readouterr().err
    path.write_text("kept")
    ask(conversation, "Well?")
    obey(f"/save {path}", conversation)
    assert "surrogates not allowed" in capsys.readouterr().err
    assert path.read_text() == "kept"


class SmallContext(FakeLLM):
    """Prompts are all contents of a conversation; a token is a character."""

    def __init__(self, max_len: int, is_refusing: bool) -> None:
        super().__init__("yes")
        self._max_len = max_len
        if not is_refusing:
            self.engine.core.max_len = max_len

    def apply_chat_template(self, messages: list[Any]) -> list[str]:
        return ["".join(message["content"] for message in messages)]

    def stream(self, prompts: Any, *args: Any, **options: Any) -> Iterator[Any]:
        if len(prompts) >= self._max_len:
            raise PromptTooLongError("the prompt is too long")
        yield from super().stream(prompts, *args, **options)


@pytest.mark.parametrize("is_refusing", [False, True], ids=["no room", "refused"])
def test_the_oldest_turns_make_room(is_refusing: bool, capsys: pytest.CaptureFixture[str]) -> None:
    llm = SmallContext(60, is_refusing)
    conversation = converse(llm, system="S" * 10)
    for letter in "abcdef":
        output = conversation.ask(letter * 15, lambda text: None)
        _explain(output, conversation)
    kept = [message["content"][:1] for message in conversation.messages]
    assert kept[:1] + kept[-2:] == ["S", "f", "y"]
    assert "b" not in kept
    assert "[the context is full: the oldest 2 messages are dropped]" in capsys.readouterr().err
    before = conversation.messages
    with pytest.raises(PromptTooLongError):
        ask(conversation, "z" * 60)
    assert conversation.messages == before


def test_an_answer_that_was_cut_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = converse(FakeLLM("one"))
    output = RequestOutput(0, None, [1, 2], "one", [1] * 64, "length", 0, 0.1, 0.2)
    _explain(output, conversation)
    expected = "[cut after 64 tokens: max_tokens is 64; /set max_tokens 128 allows more]\n"
    assert capsys.readouterr().err == expected
    conversation.params = SamplingParams(max_tokens=65)
    _explain(output, conversation)
    assert capsys.readouterr().err == "[cut after 64 tokens: the context is full]\n"


def test_retry_answers_the_last_question_again(
    pipe: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM("yes")
    conversation = converse(llm)
    pipe("One?\nTwo?\n/retry\n")
    answer_pipe(conversation)
    assert capsys.readouterr().out == "yes\n" * 3
    assert [message["content"] for message in llm.conversations[0]] == ["One?", "yes", "Two?"]
    assert roles(conversation) == ["user", "assistant"] * 2
    before = conversation.messages

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    conversation.stats.add_step = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        conversation.retry(lambda text: None)
    assert conversation.messages == before
    with pytest.raises(RequestError, match="no answer to try again"):
        converse(llm).retry(lambda text: None)


NO_CONVERSATIONS = ["{", "[]", '[{"role": "user"}]', '"x"', "[[[]]]", "\xff", "[" * 99_999]


@pytest.mark.parametrize("content", NO_CONVERSATIONS, ids=lambda content: content[:20])
def test_files_without_a_conversation(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content.encode("latin-1"))
    conversation = converse(FakeLLM("yes"))
    ask(conversation, "Well?")
    obey(f"/load {tmp_path}/file", conversation)
    assert "holds no conversation" in capsys.readouterr().err
    assert roles(conversation) == ["user", "assistant"]


def test_stats_count_all_answers(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = converse(FakeLLM("one", "two"))
    ask(conversation, "Well?")
    ask(conversation, "And?")
    obey("/stats", conversation)
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines())
    assert rows["prompts"] == "2, 4 tokens"
    assert rows["generated"].startswith("4 tokens in ")
    assert rows["decode"].endswith("(4 tokens)")


ECHO = """
from nanovllm.cli.chat import talk
class Echo:
    def ask(self, question, show):
        show(f"heard {question!r}")
talk(Echo())
"""
# The hook runs when the prompt is shown and nothing waits for a key yet. Being a call into C, it
# leaves the interrupt to whoever looks for one next.
INTERRUPT_AT_THE_PROMPT = """
import ctypes, functools, readline, signal
interrupt = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGINT)
readline.set_pre_input_hook(interrupt)
"""


@pytest.fixture
def echo() -> Iterator[TerminalProcess]:
    process = TerminalProcess("-c", ECHO)
    yield process
    process.close()


def test_pasted_lines_are_one_message(echo: TerminalProcess) -> None:
    pytest.importorskip("readline")
    echo.wait_for(lambda text: text.endswith("> "))
    echo.send("\x1b[200~one\ntwo\n\nthree\x1b[201~ four\r")
    echo.wait_for(lambda text: r"heard 'one\ntwo\n\nthree four'" in text)
    echo.send('"""\r')
    echo.wait_for(lambda text: text.endswith("... "))
    echo.send('five\rsix"""\r')
    echo.wait_for(lambda text: r"heard 'five\nsix'" in text)
    echo.send("exit\r")
    assert echo.wait() == 0


def test_an_interrupt_drops_a_message_of_several_lines(echo: TerminalProcess) -> None:
    echo.wait_for(lambda text: text.endswith("> "))
    echo.send('"""half\r')
    echo.wait_for(lambda text: text.endswith("... "))
    echo.send("\x03")
    echo.wait_for(lambda text: text.endswith("\n> "))
    echo.send('"""whole"""\r')
    echo.wait_for(lambda text: "heard 'whole'" in text and text.endswith("> "))
    assert "heard 'half" not in echo.text
    echo.send("\x03")
    assert echo.wait() == 0


def test_an_interrupt_before_the_wait_for_a_key_is_noticed() -> None:
    pytest.importorskip("readline")
    process = TerminalProcess("-c", INTERRUPT_AT_THE_PROMPT + ECHO)
    assert process.wait() == 0
    process.close()
