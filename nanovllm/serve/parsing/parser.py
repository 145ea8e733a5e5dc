"""Incremental parser of model text; the events do not depend on how the text is split into pieces.

Text outside reasoning and calls becomes content, unchanged. A call's block starts once the tool's
name and the start of the arguments are known. Until then the call's text is held back; if it turns
out to be invalid, it becomes content. Content next to a call is dropped if it is only whitespace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from uuid import uuid4

from nanovllm.engine.detokenizer import num_held
from nanovllm.serve.parsing.events import BlockDelta, BlockEvent, BlockStart, BlockStop, Kind
from nanovllm.serve.parsing.formats import ReasoningFormat, ToolCallSyntax, ToolFormat
from nanovllm.serve.parsing.reader import Reader, Waits
from nanovllm.serve.parsing.tools import Tool, as_json, is_json

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = {"name", *ARGUMENT_KEYS, "id", "type"}
IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
OUTSIDE_STRING = re.compile(r"[\w\s:,.+'-]+")
KEY_STOPS = (">", "\n")
# If the closing tag is missing, the next tag at the start of a line ends the value.
VALUE_STOPS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")


def new_call_id() -> str:
    """Return nine letters or digits, as Mistral's templates require."""
    return uuid4().hex[:9]


class OutputParser:
    """Parses one completion: call `feed` with each piece of its text, then `finish`."""

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        starts_in_reasoning: bool = False,
        new_id: Callable[[], str] = new_call_id,
        has_content: bool = True,  # False: drop text other than reasoning and calls
    ) -> None:
        # Longer names come first because a shorter one may be their prefix.
        self._tools = {tool.name: tool for tool in sorted(tools, key=lambda each: -len(each.name))}
        self._syntaxes = tool_format.syntaxes if tool_format and tools else ()
        self._openings = tuple(dict.fromkeys(syntax.opening for syntax in self._syntaxes))
        self._reasoning_format = reasoning_format
        self._starts_in_reasoning = starts_in_reasoning
        self._has_content = has_content
        self._new_id = new_id
        self.has_reasoning = False  # final only once the text has ended
        self._has_calls = False
        self._blank: str | None = ""  # leading whitespace held back; None after other text
        self._newlines = ""  # newlines held back because they may be the end of the reasoning
        self._num_blocks = 0
        self._open: Kind | None = None  # kind of the content block that has not stopped yet
        self._texts: list[str] = []  # pieces of the open block since the last event
        self._events: list[BlockEvent] = []
        self._reader = Reader()
        self._coroutine = self._read()
        next(self._coroutine)

    def feed(self, piece: str) -> list[BlockEvent]:
        self._reader.push(piece)
        next(self._coroutine)
        return self._take()

    def finish(self, is_complete: bool = True) -> list[BlockEvent]:
        """Return the last events; `is_complete` is False if the completion was cut off."""
        self._reader.close()
        for _ in self._coroutine:
            raise AssertionError("the coroutine waits for text after its end")
        self._stop(is_complete)
        return self._take()

    def _take(self) -> list[BlockEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _start(self, kind: Kind, call_id: str = "", name: str = "") -> None:
        self._stop()
        self._events.append(BlockStart(self._num_blocks, kind, call_id, name))
        self._open = kind
        self._num_blocks += 1

    def _delta(self, kind: Kind, text: str) -> None:
        if text:
            if self._open != kind:
                self._start(kind)
            self._reader.settle()
            self._texts.append(text)

    def _flush(self) -> None:
        """Emit the new text of the open block as one delta."""
        if self._open is not None and self._texts:
            text = "".join(self._texts)
            self._events.append(BlockDelta(self._num_blocks - 1, self._open, text))
            self._texts = []

    def _stop(self, is_complete: bool = True) -> None:
        if self._open is not None:
            self._flush()
            self._events.append(BlockStop(self._num_blocks - 1, self._open, is_complete))
            self._open = None

    def _read(self) -> Waits[None]:
        if self._reasoning_format is not None:
            yield from self._read_reasoning(self._reasoning_format)
        while opening := (yield from self._reader.until(self._openings, self._emit_content)):
            yield from self._read_calls(opening)
        if self._blank and not self._has_calls:
            self._delta("text", self._blank)

    def _read_reasoning(self, form: ReasoningFormat) -> Waits[None]:
        reader = self._reader
        is_begun = yield from reader.accept_all(form.begin)
        self.has_reasoning = is_begun or self._starts_in_reasoning
        if self.has_reasoning:
            yield from reader.skip("\n".__eq__)
            if (yield from reader.until((form.end,), self._emit_reasoning)):
                yield from reader.accept(form.end)
                yield from reader.skip("\n".__eq__)

    def _emit_reasoning(self, text: str) -> None:
        text = self._newlines + text
        stripped = text.rstrip("\n")
        self._newlines = text[len(stripped) :]
        self._delta("reasoning", stripped)

    def _emit_content(self, text: str) -> None:
        if not self._has_content:
            return
        if self._blank is not None:
            text = self._blank + text
            self._blank = text
            if not text.strip():
                return
            self._blank = None
        self._delta("text", text)

    def _read_calls(self, opening: str) -> Waits[None]:
        """Read tool calls; if none is valid, emit the text up to the furthest mismatch."""
        reader = self._reader
        start = reader.pos
        furthest = start + len(opening)
        for syntax in self._syntaxes:
            reader.pos = start
            if (yield from self._read_syntax(syntax)):
                return
            furthest = max(furthest, reader.pos)
        reader.pos = furthest
        # The mismatch may be inside another opening whose first characters were already consumed.
        reader.pos -= num_held(reader.since(start)[len(opening) :], self._openings)
        self._emit_content(reader.since(start))

    def _read_syntax(self, syntax: ToolCallSyntax) -> Waits[bool]:
        reader = self._reader
        if not (yield from reader.accept_all(syntax.begin)):
            return False
        if not (yield from self._read_call(syntax)):
            return False
        is_call = True
        while is_call:
            after_call = reader.pos
            yield from reader.accept_all(syntax.separator)
            is_call = yield from self._read_call(syntax)
        reader.pos = after_call
        yield from reader.accept_all(syntax.end, or_cut=True)
        return True

    def _read_call(self, syntax: ToolCallSyntax) -> Waits[bool]:
        """Read one call; return False if there is none."""
        reader = self._reader
        if not (yield from reader.accept_all(syntax.call_begin)):
            return False
        if syntax.after_name is None:
            return (yield from self._read_object())
        yield from reader.skip(str.isspace)
        name = yield from reader.accept_any(self._tools)
        if not name or not (yield from reader.accept_all(syntax.after_name)):
            return False
        if syntax.arguments == "tags":
            yield from self._read_tags(self._tools[name], syntax.call_end)
            return True
        is_call = yield from self._read_arguments(name)
        if is_call:
            yield from reader.accept_all(syntax.call_end, or_cut=True)
        return is_call

    def _read_object(self) -> Waits[bool]:
        """Read a call that is a JSON object; stream its arguments if the name comes first."""
        reader, start = self._reader, self._reader.pos
        name = ""
        if (yield from reader.accept_all('{ "name" : "')):
            name = yield from reader.accept_any(self._tools)
        for key in ARGUMENT_KEYS if name else ():
            if (yield from reader.accept_all(f'" , "{key}" :')):
                if (yield from self._read_arguments(name)):
                    yield from self._read_rest_of_object()
                    return True
                break
        reader.pos = start
        yield from reader.skip(str.isspace)
        pieces: list[str] = []
        start = reader.pos
        if not (yield from reader.accept_all("{")):
            return False
        yield from reader.skip(str.isspace)
        if not (yield from reader.accept_any(f'"{key}"' for key in CALL_KEYS)):
            return False
        reader.pos = start
        return (yield from self._read_json(pieces.append)) and self._emit_object("".join(pieces))

    def _emit_object(self, text: str) -> bool:
        """Emit a complete call; return False if it is invalid.

        Its arguments may be missing, or may be a string that contains JSON.
        """
        call = json.loads(text)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        is_object = arguments.lstrip().startswith("{") and is_json(arguments)
        if not is_object or str(name) not in self._tools or not {*call} <= CALL_KEYS:
            return False
        self._begin_call(str(name))
        self._delta("tool_call", arguments)
        self._stop()
        return True

    def _read_rest_of_object(self) -> Waits[None]:
        """Read the fields after the arguments, such as an id; if invalid, only the final brace."""
        reader = self._reader
        end = reader.pos
        has_more = yield from reader.accept_all(",")
        if not has_more or not (yield from self._read_json(lambda piece: None, '{"": 0,')):
            reader.pos = end
            yield from reader.accept_all("}", or_cut=True)

    def _read_arguments(self, name: str) -> Waits[bool]:
        yield from self._reader.skip(str.isspace)
        if (yield from self._reader.peek()) != "{":
            return False
        self._begin_call(name)
        is_complete = yield from self._read_json(partial(self._delta, "tool_call"))
        self._stop(is_complete)
        return True

    def _read_json(self, sink: Callable[[str], None], before: str = "") -> Waits[bool]:
        """Pass a JSON object to the sink; return False if it is invalid.

        `before` is the part of the object that has been read already.
        """
        reader = self._reader
        pieces = [before]
        depth, in_string, is_escaped = len(before[:1]), False, False
        while char := (yield from reader.peek()):
            piece = "" if is_escaped else reader.run(IN_STRING if in_string else OUTSIDE_STRING)
            if not piece:
                if not in_string and char not in '"{}[]':
                    break
                reader.pos += 1
                # Models write raw newlines in strings, but JSON requires them to be escaped.
                piece = json.dumps(char)[1:-1] if char < " " else char
                if is_escaped:
                    is_escaped = False
                elif char == '"':
                    in_string = not in_string
                elif in_string:
                    is_escaped = char == "\\"
                else:
                    depth += 1 if char in "{[" else -1
            pieces.append(piece)
            sink(piece)
            if depth == 0 and not in_string:
                return is_json("".join(pieces))
        return False

    def _read_tags(self, tool: Tool, call_end: str) -> Waits[None]:
        """Read all `<parameter=name>value</parameter>` tags, and emit them as a JSON object."""
        self._begin_call(tool.name)
        emit = partial(self._delta, "tool_call")
        emit("{")
        separator = ""
        while key := (yield from self._read_parameter_name()):
            emit(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from self._read_value(tool.types(key), emit)):
                break
            separator = ", "
        is_complete = yield from self._reader.accept_all(call_end, or_cut=True)
        if is_complete:
            emit("}")
        self._stop(is_complete)

    def _read_parameter_name(self) -> Waits[str]:
        reader = self._reader
        start = reader.pos
        name: list[str] = []
        if (yield from reader.accept_all("<parameter=", or_cut=True)):
            stop = yield from reader.until(KEY_STOPS, name.append)
            if stop == ">" and any(name):
                yield from reader.accept(stop)
                return "".join(name)
            if stop:
                reader.pos = start
        return ""

    def _read_value(self, types: frozenset[str], emit: Callable[[str], None]) -> Waits[bool]:
        """Emit a value up to its closing tag or the next tag; return False if there is neither."""
        reader = self._reader
        yield from reader.accept("\n")
        if types <= {"string"}:
            emit('"')
            stop = yield from reader.until(VALUE_STOPS, lambda text: emit(_escaped(text)))
            if stop:
                emit('"')
        else:
            pieces: list[str] = []
            stop = yield from reader.until(VALUE_STOPS, pieces.append)
            text = "".join(pieces)
            emit(as_json(text, types) if stop else text)
        if stop.endswith("</parameter>"):
            yield from reader.accept(stop)
        return stop != ""

    def _begin_call(self, name: str) -> None:
        self._has_calls = True
        self._blank = ""
        self._start("tool_call", self._new_id(), name)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
