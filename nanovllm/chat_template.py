"""Chat templates: Jinja programs that come with a model, run in Jinja's sandbox."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanovllm.errors import RequestError
from nanovllm.validation import require

# Options of transformers' apply_chat_template that take effect after rendering.
AFTERWARDS = frozenset((
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
))  # fmt: skip
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # appended to the message that the model continues


class ChatTemplate:
    """A model's template with the options of transformers' `apply_chat_template` that it can see.

    A template that cannot be compiled or rendered raises RequestError.
    """

    def __init__(
        self,
        template: str | Mapping[str, str],  # or several, by name
        special_tokens: Mapping[str, Any],
        compile_source: Callable[[str], Program] | None = None,  # one that remembers, if any
        *,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> None:
        is_either = not (continue_final_message and options.get("add_generation_prompt"))
        expected = "left out with add_generation_prompt: a message is continued or answered"
        require(is_either, "continue_final_message", expected, continue_final_message)
        if refused := sorted(AFTERWARDS.intersection(options)):
            message = f"a chat template has no option {refused[0]}: its text becomes ids"
            raise RequestError(message, param=refused[0])
        self._is_continuing = continue_final_message
        schemas = None if tools is None else _tool_schemas(tools)
        defaults = {"documents": None, "add_generation_prompt": not continue_final_message}
        self._variables = {**special_tokens, "tools": schemas, **defaults, **options}
        source = _choose(template, chat_template, has_tools=tools is not None)
        self._program = (compile_source or Program)(source)

    def render(self, conversation: Sequence[Mapping[str, Any]]) -> str:
        if not self._is_continuing:
            return self._program.run(conversation, self._variables)
        *before, last = conversation
        marked = [*before, {**last, "content": last["content"] + _MARK}]
        text = self._program.run(marked, self._variables)
        start = text.rfind(_MARK.strip())
        if start < 0:
            message = "the chat template does not show the message to be continued"
            raise RequestError(message, param="messages")
        is_trimmed = not text.startswith(_MARK, start)
        return text[:start].rstrip() if is_trimmed else text[:start]


class Program:
    """A compiled template; several threads may run it at once."""

    def __init__(self, source: str) -> None:
        with _request_errors():
            self._template = _sandbox().from_string(source)

    def run(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        with _request_errors():
            return self._template.render(messages=messages, **variables)


def _choose(template: str | Mapping[str, str], asked: str | None, has_tools: bool) -> str:
    """A template that was asked for, by its name or as a text; else the model's for the purpose."""
    templates = {"default": template} if isinstance(template, str) else template
    is_valid = isinstance(templates, Mapping) and isinstance(asked, str | None)
    require(is_valid, "chat_template", "a text, or one of several by name", asked or template)
    if asked is not None:
        return templates.get(asked, asked)
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    require(name in templates, "chat_template", f"one of {', '.join(templates)}", asked)
    return templates[name]


@contextlib.contextmanager
def _request_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template is a program and may raise anything
        line = getattr(error, "lineno", None)  # of a syntax error
        what = "refused the messages" if line is None else f"cannot be read, line {line}"
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        message = f"the chat template {what}: {kind}{error!s:.200}"
        raise RequestError(message, param="messages") from error


class _Generation(ext.Extension):
    """Accept `{% generation %}`, which marks assistant messages for training."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _sandbox() -> ImmutableSandboxedEnvironment:
    """Return the environment in which transformers renders templates."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


def _tool_schemas(tools: Sequence[Any]) -> list[Any]:
    require(isinstance(tools, (list, tuple)), "tools", "a list of schemas or functions", tools)
    return [_tool_schema(tool) for tool in tools]


def _tool_schema(tool: Any) -> Any:
    """Describe a function by its signature and docstring; a schema stays as it is."""
    if isinstance(tool, Mapping):
        return tool
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # a docstring that says too little has an error type of its own
        message = f"the tool {tool!r:.80} cannot be described: {error}"
        raise RequestError(message, param="tools") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
