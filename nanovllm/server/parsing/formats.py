"""How models write tool calls and reasoning: a description for each format."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

from nanovllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Frame:
    """One way to write calls: `begin call (separator call)* end`.

    A call is either a JSON object with a name and arguments, or `call_begin name after_name
    arguments call_end`. Texts stand here as the chat template writes them. The parser takes any
    white space, or none, between their words; the word `*` is any letters and digits.
    """

    begin: str = ""
    call_begin: str = ""
    after_name: str | None = None  # None: the call is an object, which holds the name
    arguments: Literal["json", "tags"] = "json"
    call_end: str = ""
    separator: str = ""
    end: str = ""
    is_shared: bool = True  # between one begin and end are all calls, not each in its own
    arguments_key: str = "arguments"  # in the object

    @property
    def opening(self) -> str:
        """The word that every call, or all of them, must begin with."""
        return [*self.begin.split(), *self.call_begin.split(), "{"][0]

    @property
    def before_name(self) -> str:
        return '{"name": "' if self.after_name is None else self.call_begin

    @property
    def before_arguments(self) -> str:
        return f'", "{self.arguments_key}": ' if self.after_name is None else self.after_name

    @property
    def after_arguments(self) -> str:
        return "}" if self.after_name is None else self.call_end


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    signs: tuple[str, ...]  # all stand in a chat template that uses this format


@dataclass(frozen=True, slots=True)
class ToolFormat(Format):
    frames: tuple[Frame, ...]  # all are understood; a grammar enforces the first

    def as_written_by(self, chat_template: str) -> ToolFormat:
        """Put frames first that the chat template writes."""

        def is_foreign(frame: Frame) -> bool:
            return not all(word in chat_template for word in (frame.after_name or "").split())

        return replace(self, frames=tuple(sorted(self.frames, key=is_foreign)))


@dataclass(frozen=True, slots=True)
class ReasoningFormat(Format):
    """Reasoning at the beginning of an answer. Newlines next to either marker are layout."""

    begin: str = "<think>"
    end: str = "</think>"

    def is_open(self, prompt: str, continued: str = "") -> bool:
        """Tell whether an answer begins inside reasoning.

        It follows the prompt, or goes on from a message at the prompt's end.
        """
        if continued.lstrip().startswith(self.begin):
            return self.end not in continued
        return prompt.rstrip().endswith(self.begin)


@dataclass(frozen=True, slots=True)
class Formats:
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    def markup(self) -> str:
        """All that marks a call or reasoning."""
        frames = self.tools.frames if self.tools is not None else ()
        texts = [getattr(frame, field.name) for frame in frames for field in fields(frame)]
        if self.reasoning is not None:
            texts += [self.reasoning.begin, self.reasoning.end]
        return "\n".join(filter(None, map(str, texts)))


T = TypeVar("T", bound=Format)

TAGGED = Frame("<tool_call>\n", separator="\n", end="\n</tool_call>", is_shared=False)
BARE_OBJECTS = Frame(separator="; ", arguments_key="parameters")
NAME_AND_ARGUMENTS = Frame("[TOOL_CALLS]", after_name="[ARGS]", is_shared=False)
FUNCTION_TAGS = replace(
    TAGGED, call_begin="<function=", after_name=">\n", arguments="tags", call_end="</function>"
)
FENCED = Frame(
    begin="<｜tool▁calls▁begin｜>",
    call_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after_name="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
    separator="\n",
    end="<｜tool▁calls▁end｜>",
)
UNFENCED = replace(
    FENCED,
    call_begin="<｜tool▁call▁begin｜>",
    after_name="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    separator="",
)

# The first whose signs are all in a chat template is chosen.
TOOL_FORMATS = (
    ToolFormat(
        "qwen3_coder",
        ("<function=", "<parameter="),
        (FUNCTION_TAGS, replace(FUNCTION_TAGS, begin="")),
    ),
    ToolFormat("hermes", ("<tool_call>", '"arguments'), (TAGGED,)),
    ToolFormat("deepseek_v3", ("<｜tool▁calls▁begin｜>",), (FENCED, UNFENCED)),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        (
            NAME_AND_ARGUMENTS,
            Frame("[TOOL_CALLS] [", separator=", ", end="]"),
            replace(NAME_AND_ARGUMENTS, after_name="[CALL_ID] * [ARGS]"),
            replace(NAME_AND_ARGUMENTS, after_name=""),
        ),
    ),
    ToolFormat(
        "llama3_json",
        ('"parameters', "<|start_header_id|>"),
        (BARE_OBJECTS, replace(BARE_OBJECTS, begin="<|python_tag|>")),
    ),
)
REASONING_FORMATS = (
    ReasoningFormat("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ReasoningFormat("qwen3", ("</think>",)),
)


def choose_formats(
    chat_template: str, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> Formats:
    """Choose each format by its name, or else by what the chat template writes."""
    tools = _choose(TOOL_FORMATS, tool_parser, chat_template)
    reasoning = _choose(REASONING_FORMATS, reasoning_parser, chat_template)
    return Formats(tools and tools.as_written_by(chat_template), reasoning)


def _choose(formats: tuple[T, ...], name: str | None, chat_template: str) -> T | None:
    if name is None:
        signed = (each for each in formats if all(sign in chat_template for sign in each.signs))
        return next(signed, None)
    by_name = {each.name: each for each in formats}
    if name not in by_name:
        raise ConfigError(f"there is no parser named {name!r}; there are: {', '.join(by_name)}")
    return by_name[name]
