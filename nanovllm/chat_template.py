"""Chat templates: Jinja programs that come with a model, run in Jinja's sandbox."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanovllm.errors import RequestError

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
        if continue_final_message and options.get("add_generation_prompt"):
            raise RequestError(
                "the last message is either continued or answered; leave out one of "
                "continue_final_message and add_generation_prompt"
            )
        if refused := sorted(AFTERWARDS.intersection(options)):
            raise RequestError(f"a chat template has no option {refused[0]}: its text becomes ids")
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
            raise RequestError("the chat template does not show the message to be continued")
        is_trimmed = not text.startswith(_MARK, start)
        return text[:start].rstrip() if is_trimmed else text[:start]


class Program:
    """A compiled template; several threads may run it at once."""

    def __init__(self, source: str) -> None:
        with _request_errors("cannot be read"):
            self._template = _sandbox().from_string(source)

    def run(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        with _request_errors("failed on the messages"):
            return self._template.render(messages=messages, **variables)


def _choose(template: str | Mapping[str, str], asked: str | None, has_tools: bool) -> str:
    """A template that was asked for, by its name or as a text; else the model's for the purpose."""
    templates = {"default": template} if isinstance(template, str) else template
    if not isinstance(templates, Mapping):
        raise RequestError(f"the model's chat template is no text: {template!r:.80}")
    if asked is not None:
        if not isinstance(asked, str):
            raise RequestError(f"chat_template is a name or a template, got {asked!r:.80}")
        return templates.get(asked, asked)
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        names = ", ".join(templates)
        raise RequestError(f"the model has chat templates {names}; choose with chat_template=")
    return templates[name]


@contextlib.contextmanager
def _request_errors(what: str) -> Iterator[None]:
    try:
        yield
    except TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        raise RequestError(f"the chat template cannot be read, {where}") from error
    except TemplateError as error:
        raise RequestError(f"the chat template refused the messages: {error}") from error
    except Exception as error:  # a template is a program and may raise anything
        raise RequestError(
            f"the chat template {what} ({type(error).__name__}: {error!s:.200}); check what the "
            "messages hold, or pass another chat_template"
        ) from error


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
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools are a list of schemas or functions, got {tools!r:.80}")
    return [_tool_schema(tool) for tool in tools]


def _tool_schema(tool: Any) -> Any:
    """Describe a function by its signature and docstring; a schema stays as it is."""
    if isinstance(tool, Mapping):
        return tool
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # a docstring that says too little has an error type of its own
        raise RequestError(f"the tool {tool!r:.80} cannot be described: {error}") from error


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
