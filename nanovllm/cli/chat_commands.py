"""What can be typed in a chat beside messages: lines that begin with a slash."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from nanovllm.cli.conversation import Conversation
from nanovllm.errors import NanovllmError, RequestError
from nanovllm.sampling_params import SamplingParams

COMMANDS = """\
/system TEXT      give the model other instructions; without a text show them
/set NAME VALUE   change a sampling parameter, as in /set temperature 0.8; alone show them
/save FILE        write the conversation to a file
/load FILE        go on with one that was saved
/retry            answer the last question again
/reset            forget the conversation
/stats            show what it took so far
/help             show this
/bye              leave, like /exit, exit or Ctrl-D
\"\"\"               begins and ends a message of several lines
Ctrl-C            stop an answer, drop a message of several lines, or else leave"""

_FAREWELLS = ("/exit", "/bye", "/quit", "exit", "quit")
# A chat shows the text of one answer, and a line is no place for the last three.
_NOT_HERE = {
    *("n", "logprobs", "prompt_logprobs"),
    *("logit_bias", "logits_processors", "structured_outputs"),
}
_NAMES = tuple(field.name for field in fields(SamplingParams) if field.name not in _NOT_HERE)


def is_farewell(line: str) -> bool:
    return line.strip().lower() in _FAREWELLS


def obey(line: str, conversation: Conversation) -> None:
    """Carry out a command; what it has to say goes to stderr."""
    name, _, argument = line.partition(" ")
    command = _COMMANDS.get(name)
    try:
        if command is None:
            raise RequestError(
                f'There is no command {name}; /help lists them (between """ a message may begin '
                "with a slash)"
            )
        answer = command(conversation, argument.strip())
    except NanovllmError as error:
        answer = str(error)
    if answer:
        print(answer, file=sys.stderr)


def _system(conversation: Conversation, text: str) -> str:
    if text:
        conversation.instruct(text)
        return ""
    return conversation.system or "No instructions beside the model's own."


def _set(conversation: Conversation, text: str) -> str:
    name, _, value = text.partition(" ")
    if not text:
        params = conversation.params
        return "\n".join(f"{name:<19} {getattr(params, name)!r}" for name in _NAMES)
    if name not in _NAMES:
        raise RequestError(f"There is no parameter {name}; there are {', '.join(_NAMES)}.")
    asked = {name: _value(name, value.strip())}
    conversation.params = replace(conversation.params, **asked)
    return ""


def _value(name: str, text: str) -> Any:
    """Read a parameter as its default's type would have it; SamplingParams checks it again."""
    default = getattr(SamplingParams(), name)
    if text.lower() in ("none", "") and default is None:
        return None
    if name.endswith("ids"):
        return list(map(_number, text.split()))
    if isinstance(default, tuple):
        return text or None
    if isinstance(default, bool):
        return {"true": True, "on": True, "false": False, "off": False}.get(text.lower(), text)
    return _number(text)


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _save(conversation: Conversation, path: str) -> str:
    conversation.save(_needed(path, "/save"))
    return f"Saved {len(conversation.messages)} messages to {path}."


def _load(conversation: Conversation, path: str) -> str:
    conversation.load(_needed(path, "/load"))
    return f"Loaded {len(conversation.messages)} messages from {path}."


def _needed(path: str, name: str) -> str:
    if not path:
        raise RequestError(f"{name} needs the name of a file.")
    return path


def _reset(conversation: Conversation, _: str) -> str:
    conversation.reset()
    return ""


_COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/system": _system,
    "/set": _set,
    "/save": _save,
    "/load": _load,
    "/reset": _reset,
    "/stats": lambda conversation, _: conversation.stats.summary(),
    "/help": lambda *_: COMMANDS,
}
