"""Chat templates: Jinja programs that come with a model, run in Jinja's sandbox."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanovllm.errors import RequestError
from nanovllm.validation import require

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # appended to the message that the model continues
# `{% generation %}` marks assistant messages for training; here it is just a scope.
_GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation\b")


class ChatTemplate:
    """A compiled template, which several threads may render at once.

    A template that cannot be compiled or rendered raises RequestError.
    """

    def __init__(self, source: str) -> None:
        with _request_errors():
            self._template = _sandbox().from_string(_GENERATION.sub(r"\1with", source))

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation as `apply_chat_template` of transformers does."""
        is_either = not (continue_final_message and variables.get("add_generation_prompt"))
        expected = "left out with add_generation_prompt: a message is continued or answered"
        require(is_either, "continue_final_message", expected, continue_final_message)
        defaults = {"documents": None, "add_generation_prompt": not continue_final_message}
        if continue_final_message:
            *before, last = conversation
            conversation = [*before, {**last, "content": last["content"] + _MARK}]
        schemas = None if tools is None else [_tool_schema(tool) for tool in tools]
        with _request_errors():
            text = self._template.render(
                messages=conversation, tools=schemas, **{**defaults, **variables}
            )
        return _before_mark(text) if continue_final_message else text


def choose_template(
    template: str | Mapping[str, str], asked: str | None = None, has_tools: bool = False
) -> str:
    """Return the template asked for, by its name or as a text; else the model's for the purpose."""
    templates = {"default": template} if isinstance(template, str) else template
    if asked is not None:
        return templates.get(asked, asked)
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    require(name in templates, "chat_template", f"one of {', '.join(templates)}", asked)
    return templates[name]


def _before_mark(text: str) -> str:
    start = text.rfind(_MARK.strip())
    if start < 0:
        message = "the chat template does not show the message to be continued"
        raise RequestError(message, param="messages")
    is_trimmed = not text.startswith(_MARK, start)
    return text[:start].rstrip() if is_trimmed else text[:start]


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


def _sandbox() -> ImmutableSandboxedEnvironment:
    """Return the environment in which transformers renders templates."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


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


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
