"""Render the Jinja chat template that ships with a model, in Jinja's sandbox."""

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

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # appended to the message that the model will continue
# `{% generation %}` marks assistant messages for training; here it only opens a scope.
_GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation\b")


class ChatTemplate:
    """A compiled template, thread-safe. Compile and render errors are raised as RequestError."""

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
        """Render a conversation as transformers' `apply_chat_template` does."""
        is_either = not (continue_final_message and variables.get("add_generation_prompt"))
        expected = "False with add_generation_prompt: they are mutually exclusive"
        require(is_either, "continue_final_message", expected, continue_final_message)
        defaults = {"documents": None, "add_generation_prompt": not continue_final_message}
        if continue_final_message:
            *before, last = conversation
            is_text = isinstance(last["content"], str)
            require(is_text, "continue_final_message", "False after a message with images", True)
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
    """Return the requested template, given by name or source, or else the model's own.

    A model may have a separate "tool_use" template for requests with tools.
    """
    templates = {"default": template} if isinstance(template, str) else template
    if asked is not None:
        return templates.get(asked, asked)
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    require(name in templates, "chat_template", f"one of {', '.join(templates)}", asked)
    return templates[name]


def _before_mark(text: str) -> str:
    start = text.rfind(_MARK.strip())
    if start < 0:
        message = "the chat template does not render the final message, so it cannot be continued"
        raise RequestError(message, param="messages")
    is_trimmed = not text.startswith(_MARK, start)
    return text[:start].rstrip() if is_trimmed else text[:start]


@contextlib.contextmanager
def _request_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template is a program and may raise anything
        line = getattr(error, "lineno", None)  # only syntax errors have a line number
        what = "rejected the messages" if line is None else f"cannot be parsed, line {line}"
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        message = f"the chat template {what}: {kind}{error!s:.200}"
        raise RequestError(message, param="messages") from error


def _sandbox() -> ImmutableSandboxedEnvironment:
    """Return a Jinja sandbox with the extensions, filters and globals that transformers has."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


def _tool_schema(tool: Any) -> Any:
    """Return the JSON schema of a tool; for a function, derive it from signature and docstring."""
    if isinstance(tool, Mapping):
        return tool
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # transformers raises error types of its own for bad docstrings
        message = f"no JSON schema can be derived from the tool {tool!r:.80}: {error}"
        raise RequestError(message, param="tools") from error


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Serialize to JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
