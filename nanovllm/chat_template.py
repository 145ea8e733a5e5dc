"""Chat templates: Jinja programs that come with a model, run in a sandbox with bounded work."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, ext, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from nanovllm.errors import RequestError

MAX_LENGTH = 2**24  # of anything a template builds, in characters or items
MAX_BITS = 4096  # of an integer
MAX_ROUNDS = 200_000  # of all loops together
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # behind the text that is to be continued


class ChatTemplate:
    """A model's template with the options of transformers' `apply_chat_template`.

    Whatever goes wrong in it is a RequestError.
    """

    def __init__(
        self,
        template: str | Mapping[str, str],  # or several, by name
        special_tokens: Mapping[str, Any],
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
        self._is_continuing = continue_final_message
        schemas = None if tools is None else _tool_schemas(tools)
        defaults = {"documents": None, "add_generation_prompt": not continue_final_message}
        self._variables = {**special_tokens, "tools": schemas, **defaults, **options}
        source = _choose(template, chat_template, has_tools=tools is not None)
        self._sandbox = _Sandbox()
        with _request_errors("cannot be read"):
            self._template = self._sandbox.from_string(source)

    def render(self, conversation: Sequence[Mapping[str, Any]]) -> str:
        if not self._is_continuing:
            return self._run(conversation)
        *before, last = conversation
        text = self._run([*before, {**last, "content": last["content"] + _MARK}])
        start = text.rfind(_MARK.strip())
        if start < 0:
            raise RequestError("the chat template does not show the message to be continued")
        is_trimmed = not text.startswith(_MARK, start)
        return text[:start].rstrip() if is_trimmed else text[:start]

    def _run(self, conversation: Sequence[Mapping[str, Any]]) -> str:
        self._sandbox.start()
        pieces, length = [], 0
        with _request_errors("failed on the messages"):
            for piece in self._template.generate(messages=conversation, **self._variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_LENGTH:
                    raise SecurityError("what it writes is too long")
        return "".join(pieces)


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
    except TemplateError as error:
        raise RequestError(f"the chat template refused the messages: {error}") from error
    except Exception as error:  # it is a program: nothing limits what it may raise
        raise RequestError(
            f"the chat template {what} ({type(error).__name__}: {error!s:.200}); check what the "
            "messages hold, or pass another chat_template"
        ) from error


class _Generation(ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 -- so Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """What templates may use, as in transformers; loops and sizes are bounded besides.

    A template comes with a download: it must not reach a file or a module, take all memory or
    never return.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        extensions = [_Generation, ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters["tojson"] = _to_json
        for name in ("tojson", "center", "indent", "format", "wordwrap", "batch", "slice"):
            self.filters[name] = _bounded(self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.start()

    def start(self) -> None:
        self._num_rounds = 0

    def tick(self) -> None:
        """Every round of every loop comes by here."""
        self._num_rounds += 1
        if self._num_rounds > MAX_ROUNDS:
            raise SecurityError(f"it loops more than {MAX_ROUNDS:,} times")

    def join(self, *values: Any) -> str:
        """What `~` does, within limits."""
        texts = list(map(str, values))
        if sum(map(len, texts)) > MAX_LENGTH:
            raise SecurityError("what it builds with ~ is too large")
        return "".join(texts)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **options)

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:
        if isinstance(getattr(function, "__self__", None), str):
            _check_sizes((*args, *options.values()))
        return super().call(context, function, *args, **options)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and re.search(r"\d{8}", value.__self__):
            raise SecurityError("it asks for a wide format")
        return None if wrapped is None else _bounded(wrapped)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _check_sizes([left] if isinstance(left, str) else [])
        elif _result_size(operator, left, right) > 1:
            raise SecurityError(f"what it builds with {operator} is too large")
        return super().call_binop(context, operator, left, right)


class _Bounds(NodeTransformer):
    """Have loops count their rounds, and `~` go through a method, as other operators can."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [])).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join", node.nodes).set_lineno(node.lineno)


def _call(method: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _result_size(operator: str, left: Any, right: Any) -> float:
    """How large a sum, product or power will be, as a share of what is allowed."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        if operator == "**":
            return bits[0] * abs(right) / MAX_BITS if abs(left) > 1 else 0
        return max(bits) / MAX_BITS if operator == "+" else sum(bits) / MAX_BITS
    if operator == "+":
        return (_len(left) + _len(right)) / MAX_LENGTH
    if operator == "*":
        counts = [number for number in (left, right) if isinstance(number, int)]
        return max(_len(left), _len(right)) * max(counts, default=0) / MAX_LENGTH
    return 0


def _len(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments are checked first."""

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        _check_sizes((*args, *options.values()))
        return function(*args, **options)

    return checked


def _check_sizes(values: Iterable[Any]) -> None:
    """Refuse widths, of a padding or in a format, that would fill the memory."""
    for value in values:
        if isinstance(value, int) and value > MAX_LENGTH:
            raise SecurityError(f"it asks for {value!r:.20} of something")
        if isinstance(value, str) and re.search(r"%[^%a-zA-Z]*(\d{8}|\*)", value):
            raise SecurityError("it asks for a wide format")


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
    """Jinja's own would escape what HTML reads as markup."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
