"""`nanovllm chat`: a conversation that streams; Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nanovllm.cli.chat_commands import COMMANDS, is_farewell, obey
from nanovllm.cli.conversation import Conversation
from nanovllm.cli.options import (
    Commands,
    add_command,
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    add_server_options,
    model_of,
    sampling_params,
)
from nanovllm.cli.remote import has_chat_template, open_model
from nanovllm.cli.run_stats import why_empty
from nanovllm.cli.terminal import WrappedText
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput

DESCRIPTION = """\
Talk to a model. It remembers the conversation, and its prefix cache remembers the work: later
turns read only what is new. Piped input is one turn per line, and only answers are printed."""

EXAMPLES = f"""\
while it runs:
  {COMMANDS.replace(chr(10), chr(10) + "  ")}

examples:
  nanovllm chat --system "You answer in one sentence."
  nanovllm chat Qwen/Qwen3-0.6B --max-tokens 2048 --max-model-len 8k
  nanovllm chat --url http://127.0.0.1:8000
  printf 'My name is Ada.\\nWhat is my name?\\n' | nanovllm chat"""

RETRY = "/retry"
QUOTES = '"""'
MORE = "... "  # the prompt between quotes
SECONDS_TO_AN_INTERRUPT = 0.2


def add_parser(commands: Commands) -> None:
    usage = "nanovllm chat [MODEL] [options]"
    parser = add_command(commands, "chat", "talk to a model", usage, DESCRIPTION, EXAMPLES)
    add_model_argument(parser)
    text = "instructions the model is given first (default: its own)"
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help=text)
    add_server_options(parser)
    # Short steps: after Ctrl-C the engine ends its step before it takes the next question.
    add_engine_options(parser, max_num_batched_tokens=1024)
    add_sampling_options(parser, max_tokens=512, temperature=0.3)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    with open_model(args) as llm:
        if not has_chat_template(llm):
            raise RequestError(f"{model_of(args)} has no chat template; use nanovllm generate")
        conversation = Conversation(llm, params, args.system)
        if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
            talk(conversation)
        else:
            answer_pipe(conversation)
    return 0


def talk(conversation: Conversation) -> None:
    """Converse with a person at a terminal until they leave."""
    _edit_lines()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    print("Type a message. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.")
    for turn in read_turns(_typed_line):
        if turn.is_command and turn.text != RETRY:
            obey(turn.text, conversation)
        else:
            _answer(turn, conversation)


def answer_pipe(conversation: Conversation) -> None:
    """Answer a pipe or a file, one turn per line."""
    if sys.stdin is None:
        return
    with open(0, encoding="utf-8", errors="replace", closefd=False) as lines:
        for turn in read_turns(lambda prompt: next(lines, None)):
            if turn.is_command and turn.text != RETRY:
                obey(turn.text, conversation)
                continue
            output = _ask(turn, conversation, _show)
            _show("\n")
            _explain(output, conversation)


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    is_command: bool


class Dropped(Exception):
    """The message of several lines that is being typed is not to be sent."""


def read_turns(read_line: Callable[[str], str | None]) -> Iterator[Turn]:
    """Yield what is said until a farewell; lines between two triple quotes are one message.

    `read_line` is given a prompt to show, returns None at the end, and may raise Dropped between
    the quotes.
    """
    while (line := read_line("> ")) is not None:
        text = line.strip()
        if text.startswith(QUOTES):
            try:
                text = _quoted(text.removeprefix(QUOTES), read_line)
            except Dropped:
                continue
            is_command = False
        elif is_farewell(text):
            return
        else:
            is_command = text.startswith("/")
        if text:
            yield Turn(text, is_command)


def _quoted(text: str, read_line: Callable[[str], str | None]) -> str:
    while not text.endswith(QUOTES):
        line = read_line(MORE)
        if line is None:
            break
        text += "\n" + line.rstrip()
    return text.removesuffix(QUOTES).strip("\n")


def _edit_lines() -> None:
    """Give input() line editing and a history; text that is pasted stays one message."""
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def _typed_line(prompt: str) -> str | None:
    try:
        with _alarm_clock():
            return input(prompt)
    except (EOFError, KeyboardInterrupt) as error:
        print()
        if prompt == MORE and isinstance(error, KeyboardInterrupt):
            raise Dropped from None
        return None


@contextlib.contextmanager
def _alarm_clock() -> Iterator[None]:
    """Wake input() now and then: it would sleep through a Ctrl-C that came just before it waits."""
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_AN_INTERRUPT, SECONDS_TO_AN_INTERRUPT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def _answer(turn: Turn, conversation: Conversation) -> None:
    try:
        output = _ask(turn, conversation, WrappedText(sys.stdout).write)
        print("\n")
        _explain(output, conversation)
    except KeyboardInterrupt:
        print("\n[stopped]\n")
    except RequestError as error:
        print(f"{error}. /reset starts a new conversation.", file=sys.stderr)


def _ask(
    turn: Turn, conversation: Conversation, show: Callable[[str], None]
) -> RequestOutput | None:
    return conversation.retry(show) if turn.is_command else conversation.ask(turn.text, show)


def _explain(output: RequestOutput | None, conversation: Conversation) -> None:
    """Print why an answer is empty or cut, and how many turns were dropped for it."""
    if output is None:
        return
    if conversation.num_dropped:
        text = f"[the context is full: the oldest {conversation.num_dropped} messages are dropped]"
        print(text, file=sys.stderr)
    if output.error is not None or not output.text.strip():
        print(why_empty(output), file=sys.stderr)
    elif output.finish_reason == "length":
        most = conversation.params.max_new_tokens
        why = f"max_tokens is {most}; /set max_tokens {2 * most} allows more"
        if len(output.token_ids) < most:
            why = "the context is full"
        print(f"[cut after {len(output.token_ids)} tokens: {why}]", file=sys.stderr)


def _show(text: str) -> None:
    print(text, end="", flush=True)
