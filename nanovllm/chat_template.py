"""Chat templates: Jinja programs that come with a model, run in a sandbox with bounded work."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, ext, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from nanovllm.errors import RequestError

MAX_LENGTH = 2**24  # of anything a template builds, in characters or items
MAX_BITS = 4096  # of an integer
MAX_BUILT = 2**29  # characters or items of all that it builds in one run
MAX_ROUNDS = 500_000  # of all loops, calls and filters together
MAX_SECONDS = 20  # of the thread's time on a core
MAX_FORM = 1000  # of a date
# Filters that hand on what they are given, and what repeats an argument.
# fmt: off
PASSING = frozenset((
    "attr", "batch", "count", "d", "default", "first", "float", "int", "items", "last", "length",
    "list", "map", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
))
# What transformers does with a template's text; the template sees nothing of it.
AFTERWARDS = frozenset((
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
))
# fmt: on
MULTIPLYING = frozenset(("expandtabs", "indent", "translate", "urlize", "wordwrap"))
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # behind the text that is to be continued


class ChatTemplate:
    """A model's template with the options of transformers' `apply_chat_template` that it can see.

    Whatever goes wrong in it is a RequestError.
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
    """A template that was compiled; several threads may run it at once."""

    def __init__(self, source: str) -> None:
        self._sandbox = _Sandbox()
        with _request_errors("cannot be read"):
            self._template = self._sandbox.from_string(source)

    def run(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        self._sandbox.work.start()
        pieces, length = [], 0
        with _request_errors("failed on the messages"):
            for piece in self._template.generate(messages=messages, **variables):
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
    except TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        raise RequestError(f"the chat template cannot be read, {where}") from error
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


class _Work(threading.local):
    """How much a template did in this thread."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.num_rounds = self.num_built = 0
        self.end = time.thread_time() + MAX_SECONDS

    def add(self, num_built: int) -> None:
        self.num_rounds += 1
        self.num_built += num_built
        if self.num_rounds > MAX_ROUNDS:
            raise SecurityError(f"it loops more than {MAX_ROUNDS:,} times")
        if self.num_built > MAX_BUILT or time.thread_time() > self.end:
            raise SecurityError("it works too much")


class _Sandbox(ImmutableSandboxedEnvironment):
    """What templates may use, as in transformers; loops, calls, sizes and time are bounded besides.

    A template comes with a download: it must not reach a file or a module, take all memory or
    never return. So what is to be built is weighed first, and counted once it is there.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        self.work = _Work()
        options = {"trim_blocks": True, "lstrip_blocks": True, "finalize": self.show}
        super().__init__(extensions=[_Generation, ext.loopcontrols], **options)
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, call) for name, call in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form[:MAX_FORM])
        del self.globals["lipsum"]  # which writes as much as it is asked for

    def tick(self, num_built: int = 0) -> None:
        """Every round of a loop, every call, filter and operator comes by here."""
        self.work.add(num_built)

    def show(self, value: Any) -> Any:
        """What `{{ }}` prints."""
        self.tick(_weigh([value]))
        return value

    def join(self, *values: Any) -> str:
        """What `~` does."""
        self.tick(_weigh(values))
        return "".join(map(str, values))

    def cut(self, value: Any, *bounds: Any) -> Any:
        """What `[a:b]` does."""
        return self._count(value[slice(*bounds)])

    def _count(self, result: Any) -> Any:
        self.tick(_len(result))
        if _len(result) > MAX_LENGTH:
            raise SecurityError("what it builds is too large")
        return result

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **options)

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # Jinja wraps `format`
        owner = getattr(method, "__self__", None)
        if owner is self:
            return function(*args)
        if isinstance(owner, (str, bytes, int)):
            args = _listed(args)
            _check_size(method.__name__, owner, (*args, *options.values()))
        return self._count(super().call(context, function, *args, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, (str, bytes)):
            _check_size("%", left, [right])
        elif _result_size(operator, left, right) > 1:
            raise SecurityError(f"what it builds with {operator} is too large")
        return self._count(super().call_binop(context, operator, left, right))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose arguments are checked first, and whose result is counted."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # behind Jinja's own argument

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            args = _listed(args)
            if name not in PASSING:
                value, *others = args[first:]
                _check_size(name, value, (*others, *options.values()))
            return self._count(function(*args, **options))

        return checked


class _Bounds(NodeTransformer):
    """Have loops and macros count what they do, and `~` and slices go through methods."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        num_built = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        tick = _call("tick", [nodes.Const(num_built)])
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join", node.nodes).set_lineno(node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        args = [nodes.Const(None) if bound is None else bound for bound in bounds]
        return _call("cut", [node.node, *args]).set_lineno(node.lineno)


def _call(method: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _listed(args: Iterable[Any]) -> tuple[Any, ...]:
    """What comes one by one is weighed as a list."""
    return tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)


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
    return len(value) if isinstance(value, (str, bytes, Collection)) else 0


def _check_size(name: str, value: Any, others: Sequence[Any]) -> None:
    """Refuse a method or filter of a value, or `%`, whose result would fill the memory."""
    bulk = _weigh(others)
    size = _weigh([value]) + bulk
    numbers = sum(number for number in others if isinstance(number, int))
    if name in ("%", "format", "format_map"):
        text = str(value)
        if re.search(r"%[^%a-zA-Z]*\*|{[^{}]+{", text.replace("{{", "")):
            raise SecurityError("it asks for a wide format by number")
        widths = sum(map(int, re.findall(r"\d+", text)))
        size += widths + max(text.count("%"), text.count("{")) * bulk
    elif name == "join":
        size += _len(value) * sum(map(_len, others[:1]))
    elif name == "replace":
        size += sum(str(value).count(str(old)) for old in others[:1]) * bulk
    elif name == "sum":  # of lists: every one is copied with all before it
        is_number = all(isinstance(other, (str, int, float)) for other in others)
        size *= 1 if is_number else _len(value)
    else:
        size += (_len(value) if name in MULTIPLYING else 1) * (bulk + numbers)
    if size > MAX_LENGTH:
        raise SecurityError(f"what it builds with {name} is too large")


def _weigh(values: Iterable[Any]) -> int:
    """How many characters all values take when printed; what occurs again is looked at once."""
    known: dict[int, int] = {}

    def weigh(value: Any) -> int:
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3 + 1
        if isinstance(value, Namespace):
            return weigh(object.__getattribute__(value, "_Namespace__attrs"))
        if not isinstance(value, Collection):
            return 1
        if id(value) not in known:
            parts = value.items() if isinstance(value, Mapping) else value
            known[id(value)] = weigh_all(parts)
        return known[id(value)]

    def weigh_all(parts: Iterable[Any]) -> int:
        total = 0
        for part in parts:
            total += 1 + weigh(part)
            if total > MAX_LENGTH:
                raise SecurityError("what it builds is too large")
        return total

    return weigh_all(values)


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
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces, length = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_LENGTH:
            raise SecurityError("what it builds with tojson is too large")
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
