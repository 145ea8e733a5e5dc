"""Formats in which models write tool calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

from nanovllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ToolCallSyntax:
    """One syntax of tool calls: `begin call (separator call)* end`.

    A call is either a JSON object with a name and arguments, or `call_begin name after_name
    arguments call_end`. The markers are written as in the chat template. The parser accepts any
    whitespace, or none, before each of their words; the word `*` matches letters and digits.
    """

    begin: str = ""
    call_begin: str = ""
    after_name: str | None = None  # None: the call is a JSON object that contains the name
    arguments: Literal["json", "tags"] = "json"
    call_end: str = ""
    separator: str = ""
    end: str = ""
    is_shared: bool = True  # one `begin` and `end` enclose all calls; False: each call has its own
    arguments_key: str = "arguments"  # key of the arguments in the JSON object

    @property
    def opening(self) -> str:
        """First word of each call or, if `is_shared`, of the whole group of calls."""
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
    template_markers: tuple[str, ...]  # a chat template that contains all of these uses this format


@dataclass(frozen=True, slots=True)
class ToolFormat(Format):
    syntaxes: tuple[ToolCallSyntax, ...]  # the parser accepts all; forced calls use the first

    def prefer_template_order(self, chat_template: str) -> ToolFormat:
        """Return the format with the syntaxes that the chat template uses moved to the front."""

        def is_foreign(syntax: ToolCallSyntax) -> bool:
            return not all(word in chat_template for word in (syntax.after_name or "").split())

        return replace(self, syntaxes=tuple(sorted(self.syntaxes, key=is_foreign)))


@dataclass(frozen=True, slots=True)
class ReasoningFormat(Format):
    """Reasoning at the start of a completion. Newlines next to the markers are dropped."""

    begin: str = "<think>"
    end: str = "</think>"

    def is_open(self, prompt: str, continued: str = "") -> bool:
        """Return whether the completion of `prompt` begins inside reasoning.

        `continued` is the text of the final message if the completion continues that message.
        """
        if continued.lstrip().startswith(self.begin):
            return self.end not in continued
        return prompt.rstrip().endswith(self.begin)


@dataclass(frozen=True, slots=True)
class Formats:
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    def markup(self) -> str:
        """Return all markers of tool calls and reasoning, one per line."""
        syntaxes = self.tools.syntaxes if self.tools is not None else ()
        texts = [getattr(syntax, field.name) for syntax in syntaxes for field in fields(syntax)]
        if self.reasoning is not None:
            texts += [self.reasoning.begin, self.reasoning.end]
        return "\n".join(filter(None, map(str, texts)))


T = TypeVar("T", bound=Format)

TAGGED = ToolCallSyntax("<tool_call>\n", separator="\n", end="\n</tool_call>", is_shared=False)
BARE_OBJECTS = ToolCallSyntax(separator="; ", arguments_key="parameters")
NAME_AND_ARGUMENTS = ToolCallSyntax("[TOOL_CALLS]", after_name="[ARGS]", is_shared=False)
FUNCTION_TAGS = replace(
    TAGGED, call_begin="<function=", after_name=">\n", arguments="tags", call_end="</function>"
)
FENCED = ToolCallSyntax(
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

# The first format whose `template_markers` all occur in the chat template is chosen.
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
            ToolCallSyntax("[TOOL_CALLS] [", separator=", ", end="]"),
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
    """Choose each format by name or, without a name, by the markers in the chat template."""
    tools = _choose(TOOL_FORMATS, tool_parser, chat_template)
    reasoning = _choose(REASONING_FORMATS, reasoning_parser, chat_template)
    return Formats(tools and tools.prefer_template_order(chat_template), reasoning)


def _choose(formats: tuple[T, ...], name: str | None, chat_template: str) -> T | None:
    if name is None:
        matching = (
            each
            for each in formats
            if all(marker in chat_template for marker in each.template_markers)
        )
        return next(matching, None)
    by_name = {each.name: each for each in formats}
    if name not in by_name:
        raise ConfigError(f"unknown parser {name!r}; choose one of: {', '.join(by_name)}")
    return by_name[name]
