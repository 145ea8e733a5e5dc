"""Chat with a model. The conversation is kept, and the prefix cache avoids computing it again: each
turn computes only its new tokens. With piped input, every line is a turn, and only the model's
replies are printed.

commands:
  /system TEXT      replace the system prompt; without TEXT, show it
  /image FILE       show an image with the next message; without FILE, forget such images
  /set NAME VALUE   change a sampling parameter, as in /set temperature 0.8; alone, show all
  /save FILE        write the conversation to a file
  /load FILE        continue a saved conversation
  /retry            generate the last reply again
  /reset            forget the conversation
  /stats            show token counts and speed so far
  /help             show this help
  /bye              leave, like /exit, exit or Ctrl-D
  \"\"\"               begin and end a message of several lines
  Ctrl-C            stop a reply or discard a message of several lines; otherwise leave

examples:
  nanovllm chat Qwen/Qwen3-0.6B --system "You answer in one sentence." --max-tokens 2048
  nanovllm chat --url http://127.0.0.1:8000
  printf 'My name is Ada.\\nWhat is my name?\\n' | nanovllm chat
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli import options
from nanovllm.cli.images import data_url, user_message
from nanovllm.cli.output import RunStats, TextView, why_empty
from nanovllm.cli.start import has_chat_template, open_model
from nanovllm.engine.conversations import as_conversations
from nanovllm.engine.images import ImageParts, PromptImage, outside_ids
from nanovllm.errors import NanovllmError, PromptTooLongError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.client import HttpLLM

if TYPE_CHECKING:
    from nanovllm.llm import LLM

QUOTES = '"""'
MORE = "... "  # continuation prompt inside triple quotes
FAREWELLS = ("/exit", "/bye", "/quit", "exit", "quit")
# /set does not offer these parameters: a chat shows one text without logprobs (first line), and
# values of the others are dicts or functions, which are hard to type (second line).
HIDDEN = {
    *("n", "logprobs", "prompt_logprobs"),
    *("logit_bias", "logits_processors", "structured_outputs"),
}
PARAMETERS = [field.name for field in fields(SamplingParams) if field.name not in HIDDEN]
WORDS = {"none": "null", "on": "true", "off": "false"}  # accepted in addition to JSON's literals

ReadLine = Callable[[str], str | None]  # shows a prompt, returns a line; None at end of input


def add_parser(commands: options.Commands) -> None:
    usage = "nanovllm chat [MODEL] [options]"
    parser = options.add_command(commands, "chat", "chat with a model", usage, __doc__ or "")
    options.add_model_argument(parser)
    text = "the system prompt (default: that of the chat template)"
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help=text)
    options.add_server_options(parser)
    # Keep steps short: after Ctrl-C, the current step must finish before the next message.
    options.add_engine_options(parser, max_num_batched_tokens=1024)
    options.add_sampling_options(parser, max_tokens=512, temperature=0.3)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    with open_model(args) as llm:
        if not has_chat_template(llm):
            raise RequestError("this model has no chat template; use nanovllm generate instead")
        conversation = Conversation(llm, params, args.system)
        if sys.stdin.isatty() and sys.stdout.isatty():
            talk(conversation)
        else:
            with open(0, encoding="utf-8", errors="replace", closefd=False) as lines:
                converse(conversation, lambda prompt: next(lines, None))
    return 0


def talk(conversation: Conversation) -> None:
    """Chat at a terminal, with line editing and input history."""
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()

    def read_line(prompt: str) -> str | None:
        try:
            return session.prompt(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            if prompt == MORE:
                raise
            return None

    print("Type a message. /help lists commands; Ctrl-C stops a reply, Ctrl-D leaves.")
    converse(conversation, read_line, is_interactive=True)


def converse(conversation: Conversation, read_line: ReadLine, is_interactive: bool = False) -> None:
    """Reply to messages and run commands until the input ends or the user leaves."""
    while (line := read_line("> ")) is not None and line.strip().lower() not in FAREWELLS:
        try:
            _handle(line.strip(), conversation, read_line)
        except (KeyboardInterrupt, RequestError) as error:
            if not is_interactive:
                raise
            is_stopped = isinstance(error, KeyboardInterrupt)
            print("\n[stopped]" if is_stopped else f"{error}. /reset starts a new conversation.")
        if is_interactive:
            print()


def _handle(text: str, conversation: Conversation, read_line: ReadLine) -> None:
    """Run a command or reply to a message; triple quotes enclose a message of several lines."""
    if text.startswith("/"):
        run_command(text, conversation)
        return
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES)
        while not text.endswith(QUOTES) and (line := read_line(MORE)) is not None:
            text += "\n" + line.rstrip()
        text = text.removesuffix(QUOTES).strip("\n")
    if text:
        _reply(conversation, functools.partial(conversation.ask, text))


def _reply(
    conversation: Conversation, ask: Callable[[Callable[[str], None]], RequestOutput]
) -> None:
    """Print a reply, and the reason if it is empty or cut off."""
    with TextView() as view:
        output = ask(view.write)
    print()
    if conversation.num_dropped:
        text = f"[the context is full: dropped the oldest {conversation.num_dropped} messages]"
        print(text, file=sys.stderr)
    if output.error is not None or not output.text.strip():
        print(why_empty(output), file=sys.stderr)
    elif output.finish_reason == "length":
        count, most = len(output.token_ids), conversation.params.max_new_tokens
        why = f"max_tokens is {most}; /set max_tokens {2 * most} allows more"
        why = "the context is full" if count < most else why
        print(f"[cut off after {count} tokens: {why}]", file=sys.stderr)


def run_command(line: str, conversation: Conversation) -> None:
    """Run a line that begins with a slash; its output goes to stderr."""
    name, _, argument = line.partition(" ")
    try:
        if name not in _COMMANDS:
            text = "there is no such command; /help lists them"
            raise RequestError(f'{text} (inside """ a message may begin with a slash)')
        message = _COMMANDS[name](conversation, argument.strip())
    except (NanovllmError, OSError, ValueError, RecursionError) as error:
        message = f"{name}: {error}"
    if message:
        print(message, file=sys.stderr)


def _system(conversation: Conversation, text: str) -> str | None:
    if not text:
        return conversation.system or "No system prompt except the chat template's own."
    conversation.instruct(text)
    return None


def _image(conversation: Conversation, path: str) -> str:
    conversation.images = [*conversation.images, data_url(path)] if path else []
    return f"Images of the next message: {len(conversation.images)}"


def _set(conversation: Conversation, text: str) -> str | None:
    name, _, value = text.partition(" ")
    params = conversation.params
    if not text:
        return "\n".join(f"{name:<19} {getattr(params, name)!r}" for name in PARAMETERS)
    if name not in PARAMETERS:
        raise RequestError(
            f"there is no parameter {name}; the parameters are {', '.join(PARAMETERS)}"
        )
    conversation.params = replace(params, **{name: _value(name, value.strip())})
    return None


def _value(name: str, text: str) -> Any:
    """Parse a value that the user entered; SamplingParams checks its type."""
    if name in ("stop", "bad_words"):
        return text or None
    if name.endswith("ids") and text.lower() != "none":
        text = f"[{','.join(text.split())}]"
    with contextlib.suppress(ValueError):
        return json.loads(WORDS.get(text.lower(), text.lower()))
    return text


def _save(conversation: Conversation, path: str) -> str:
    text = json.dumps(conversation.messages, indent=2, ensure_ascii=False)
    Path(path).write_bytes(text.encode())
    return f"Saved {len(conversation.messages)} messages to {path}."


def _load(conversation: Conversation, path: str) -> str:
    messages = json.loads(Path(path).read_text(encoding="utf-8"))
    [checked] = as_conversations(messages, ImageParts(None))
    pairs = zip(messages, checked, strict=True)
    conversation.messages = [
        own if isinstance(each["content"], list) else each for own, each in pairs
    ]
    return f"Loaded {len(conversation.messages)} messages from {path}."


_COMMANDS: dict[str, Callable[[Conversation, str], str | None]] = {
    "/system": _system,
    "/image": _image,
    "/set": _set,
    "/save": _save,
    "/load": _load,
    "/retry": lambda conversation, _: _reply(conversation, conversation.retry),
    "/reset": lambda conversation, _: conversation.reset(),
    "/stats": lambda conversation, _: conversation.stats.summary(),
    "/help": lambda *_: __doc__,
}


class Conversation:
    """The messages so far; `ask` adds a user message and the model's reply."""

    def __init__(
        self, llm: LLM | HttpLLM, params: SamplingParams, system: str | None = None
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.images: list[str] = []  # data URLs of the images of the next message
        self.params = params
        self.stats: RunStats = RunStats()
        self.num_dropped = 0  # number of messages dropped to make room for the last one
        self._llm = llm
        self._read: dict[str, PromptImage] = {}  # the images of the last prompt, by their URLs
        if system is not None:
            self.instruct(system)

    @property
    def system(self) -> str | None:
        is_first = bool(self.messages) and self.messages[0]["role"] == "system"
        return self.messages[0]["content"] if is_first else None

    def instruct(self, system: str) -> None:
        """Replace the system prompt, as if it had been there from the start."""
        self.messages[: self.system is not None] = [_message("system", system)]

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages, self.images = self.messages[: self.system is not None], []

    def ask(self, question: str, show: Callable[[str], None]) -> RequestOutput:
        """Stream the reply to a question to `show`, and return the output.

        The oldest turns are dropped when the context has no room for them. The partial text of an
        interrupted reply is kept; a question without any reply is forgotten.
        """
        before = self.messages
        try:
            return self._reply_to(user_message(question, self.images), show)
        finally:
            if self.messages is not before:  # they now have the images
                self.images = []

    def _reply_to(self, question: dict[str, Any], show: Callable[[str], None]) -> RequestOutput:
        messages = [*self.messages, question]
        self.num_dropped = 0
        while True:
            try:
                return self._generate(messages, show)
            except PromptTooLongError:
                shorter = _without_oldest_turn(messages)
                if shorter is None:
                    raise
                self.num_dropped += len(messages) - len(shorter)
                messages = shorter

    def retry(self, show: Callable[[str], None]) -> RequestOutput:
        """Generate the last reply again; keep the old reply if this fails."""
        before = self.messages
        if [message["role"] for message in before[-2:]] != ["user", "assistant"]:
            raise RequestError("there is no reply to generate again")
        self.messages = shorter = before[:-2]
        try:
            return self._reply_to(before[-2], show)
        finally:
            if self.messages is shorter:
                self.messages = before

    def _generate(
        self, messages: list[dict[str, Any]], show: Callable[[str], None]
    ) -> RequestOutput:
        [prompt] = self._llm.apply_chat_template([messages])
        if isinstance(prompt, Mapping):
            prompt = self._with_read_images(prompt)
        if not self._has_room(prompt) and _without_oldest_turn(messages) is not None:
            raise PromptTooLongError("the context has no room for a reply")
        reply, output = "", None
        pieces = self._llm.stream([prompt], self.params)
        try:
            with contextlib.closing(pieces):
                for piece in self.stats.count(pieces):
                    reply += piece.text
                    show(piece.text)
                    output = piece.output
        finally:
            if reply or output is not None:
                self.messages = [*messages, _message("assistant", reply)]
        assert output is not None, "the last piece of a stream has an output"
        return output

    def _with_read_images(self, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the images of a prompt, except for those that the last prompt had."""
        if isinstance(self._llm, HttpLLM):
            return prompt
        urls = prompt["multi_modal_data"]["image"]
        sources = [self._read.get(str(url), url) for url in urls]
        reader = self._llm.engine.input_processor.image_reader
        placed = reader.place(prompt["prompt_token_ids"], sources)
        self._read = dict(zip(map(str, urls), placed.images, strict=True))
        ids = outside_ids(placed.token_ids, placed.images)
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": placed.images}}

    def _has_room(self, prompt: Any) -> bool:
        """Whether a reply of useful length fits in the context; assumed for a server."""
        if isinstance(self._llm, HttpLLM):
            return True
        ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
        max_len = self._llm.engine.core.max_len
        return len(ids) + min(self.params.max_new_tokens, max_len // 4) <= max_len


def _without_oldest_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Drop the first user message and its replies; return None if it is the only user message."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return None if len(users) < 2 else messages[: users[0]] + messages[users[1] :]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
