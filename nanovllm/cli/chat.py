"""`nanovllm chat`: a conversation that streams; Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from nanovllm.cli.options import (
    HELP_FORMAT,
    add_engine_options,
    add_sampling_options,
    engine_config,
    sampling_params,
)
from nanovllm.cli.start import load_llm
from nanovllm.cli.terminal import printable
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

DESCRIPTION = """\
Talk to a model. It remembers the conversation, and its prefix cache remembers the work: later
turns read only what is new. Piped input is one turn per line, and only answers are printed."""

COMMANDS = """\
/reset  forget the conversation
/help   show this
/exit   leave, like Ctrl-D
Ctrl-C  stop an answer, or leave while nothing runs"""

EXAMPLES = f"""\
while it runs:
  {COMMANDS.replace(chr(10), chr(10) + "  ")}

examples:
  nanovllm chat --system "You answer in one sentence."
  nanovllm chat --model Qwen/Qwen3-0.6B --max-tokens 2048
  printf 'My name is Ada.\\nWhat is my name?\\n' | nanovllm chat"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        usage="nanovllm chat [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HELP_FORMAT,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="instructions the model is given first (default: its own)"
    )
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=512, temperature=0.3)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config, params = engine_config(args), sampling_params(args)
    with load_llm(config) as llm:
        conversation = Conversation(llm, params, args.system)
        if sys.stdin.isatty() and sys.stdout.isatty():
            talk(conversation)
        else:
            answer_lines(conversation)
    return 0


class Conversation:
    """The messages so far; `ask` adds a question and its answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self._llm = llm
        self._params = params
        self._system = system
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [_message("system", self._system)]

    def ask(
        self, question: str, show: Callable[[str], None], is_stopped: Callable[[], bool]
    ) -> None:
        """Stream an answer to `show`. Stopped early, what was shown is what is remembered."""
        messages = [*self.messages, _message("user", question)]
        [prompt] = self._llm.apply_chat_template(messages)
        answer = ""
        with contextlib.closing(self._llm.stream(prompt, self._params)) as pieces:
            for piece in pieces:
                show(piece.text)
                answer += piece.text
                if is_stopped():
                    break
        self.messages = [*messages, _message("assistant", answer)]


def talk(conversation: Conversation) -> None:
    """Converse with a person at a terminal until they leave."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 -- gives input() line editing and a history
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    print("Type a message. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.")
    while (line := _read_line()) != "/exit":
        if line.startswith("/"):
            _obey(line, conversation)
        elif line:
            _answer(line, conversation)


def answer_lines(conversation: Conversation) -> None:
    """Answer a pipe or a file, one turn per line."""
    with open(0, encoding="utf-8", errors="replace", closefd=False) as lines:
        for line in map(str.strip, lines):
            if line == "/exit":
                return
            if line.startswith("/"):
                _obey(line, conversation)
            elif line:
                conversation.ask(line, _show, is_stopped=lambda: False)
                _show("\n")


def _read_line() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return "/exit"


def _obey(command: str, conversation: Conversation) -> None:
    if command == "/reset":
        conversation.reset()
    elif command == "/help":
        print(COMMANDS, file=sys.stderr)
    else:
        print(f"There is no command {command}; /help lists them.", file=sys.stderr)


def _answer(question: str, conversation: Conversation) -> None:
    try:
        with _ctrl_c_flag() as is_stopped:
            conversation.ask(question, lambda text: _show(printable(text)), is_stopped)
        print("\n")
    except RequestError as error:
        print(f"{error}. /reset starts a new conversation.", file=sys.stderr)


def _show(text: str) -> None:
    print(text, end="", flush=True)


@contextlib.contextmanager
def _ctrl_c_flag() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a flag: an exception could strike in the middle of an engine step.

    A second Ctrl-C raises KeyboardInterrupt after all, should the engine not get to look.
    """
    is_pressed = False

    def on_ctrl_c(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
