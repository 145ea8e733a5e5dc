"""Outputs of models with the events that the parser must emit for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nanovllm.serve.parsing.events import BlockDelta, BlockEvent, BlockStart, BlockStop
from nanovllm.serve.parsing.formats import choose_formats
from nanovllm.serve.parsing.parser import OutputParser
from nanovllm.serve.parsing.tools import Tool

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "is_metric": {"type": "boolean"},
    "tags": {"type": "array"},
    "place": {"$ref": "#/$defs/place"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "unit": {"enum": ["C", "F"]},
}
WEATHER = Tool(
    "get_weather",
    {"type": "object", "properties": PROPERTIES, "$defs": {"place": {"type": "object"}}},
)
TOOLS = [Tool("get", {}), WEATHER, Tool("get_time", {"type": "object", "properties": {}})]
FORMATS = ("hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3")


def merge(events: Iterable[BlockEvent]) -> list[BlockEvent]:
    """Join adjacent deltas of a content block."""
    merged: list[BlockEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        is_more = isinstance(last, BlockDelta) and isinstance(event, BlockDelta)
        if is_more and last.index == event.index:
            merged[-1] = replace(last, text=last.text + event.text)
        else:
            merged.append(event)
    return merged


@dataclass(frozen=True)
class Case:
    text: str
    found: tuple[BlockEvent, ...]
    format: str
    reasoning: str | None = None
    starts_in_reasoning: bool = False

    def parser(self) -> OutputParser:
        formats = choose_formats("", self.format, self.reasoning)
        ids = map("id{}".format, itertools.count())
        reasoning = formats.reasoning if self.reasoning else None
        return OutputParser(TOOLS, formats.tools, reasoning, self.starts_in_reasoning, ids.__next__)

    def read(self, pieces: Iterable[str]) -> list[BlockEvent]:
        parser = self.parser()
        events = [event for piece in pieces for event in parser.feed(piece)]
        return merge([*events, *parser.finish()])


@dataclass(frozen=True)
class Reasoning:
    text: str


def found(
    *parts: str | Reasoning | tuple[str, str] | tuple[str, str, bool],
) -> tuple[BlockEvent, ...]:
    """Return the events of parts: a string is content, a name with arguments is a call."""
    events: list[BlockEvent] = []
    num_calls = 0
    for index, part in enumerate(parts):
        if isinstance(part, str):
            start, text, is_complete = BlockStart(index, "text"), part, True
        elif isinstance(part, Reasoning):
            start, text, is_complete = BlockStart(index, "reasoning"), part.text, True
        else:
            name, text, *rest = part
            start, is_complete = BlockStart(index, "tool_call", f"id{num_calls}", name), all(rest)
            num_calls += 1
        events += [
            start,
            BlockDelta(index, start.kind, text),
            BlockStop(index, start.kind, is_complete),
        ]
    return tuple(events)


PARIS = '{"city": "Paris"}'
HARD = (
    r'{"city": "a\"}]\\ <tool_call>\n</tool_call> [TOOL_CALLS] é \u00e9 \ud83d\ude00 {", '
    r'"x": [{"y": [-1.5e3, true, null]}, []]}'
)


def cut(text: str, last: str) -> str:
    """Truncate a text after the last occurrence of a substring."""
    return text[: text.rindex(last) + len(last)]


def hermes(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(*tags: str, name: str = "get_weather") -> str:
    body = "".join(f"<parameter={tag}\n</parameter>\n" for tag in tags)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def llama(arguments: str, name: str = "get_weather") -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def deepseek(*arguments: str) -> str:
    calls = "\n".join(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{each}\n```<｜tool▁call▁end｜>"
        for each in arguments
    )
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


Texts = list[tuple[str, tuple[BlockEvent, ...]]]


def no_calls(*texts: str) -> Texts:
    return [(text, found(text)) for text in texts]


def hermes_texts() -> Texts:
    paris = ("get_weather", PARIS)
    begun = '<tool_call>\n{"name": "get_weather", "arguments": {"city": '
    return [
        ("", ()),
        (hermes(PARIS), found(paris)),
        (hermes(HARD), found(("get_weather", HARD))),
        (f"Sure.\n\n{hermes(PARIS)}\n", found("Sure.\n\n", paris)),
        (f"{hermes(PARIS)}\n{hermes('{}', 'get')}", found(paris, ("get", "{}"))),
        (f" {hermes(PARIS)} and\n{hermes('{}', 'get_time')} done ",
         found(paris, " and\n", ("get_time", "{}"), " done ")),
        # Other key orders and whitespace.
        (f'<tool_call>{{"arguments":{PARIS},"name":"get_weather"}}</tool_call>', found(paris)),
        (f'<tool_call> {{ "id" : "1", "name" : "get_weather" , "arguments" : {PARIS} , '
         '"type": "function" } </tool_call>', found(paris)),
        ('<tool_call>{"name": "get"}</tool_call>', found(("get", "{}"))),
        (r'<tool_call>{"name": "get", "arguments": "{\"a\": 1}"}</tool_call>',
         found(("get", '{"a": 1}'))),
        (f"<tool_call>\n{llama(PARIS)}\n{llama(PARIS)}\n</tool_call>", found(paris, paris)),
        (f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}</tool_call>', found(paris)),
        ('<tool_call>{"name": "get", "arguments": {"a": "1\n2\t3"}}</tool_call>',
         found(("get", r'{"a": "1\n2\t3"}'))),
        (f"<tool_<tool_call><tool_call>{hermes(PARIS)}",
         found("<tool_<tool_call><tool_call>", paris)),
        *no_calls(
            " \n",
            "Hello <b>world</b> {1}",
            hermes(PARIS, "unknown"),
            hermes(PARIS, "get_weathers"),
            hermes("[1]"),
            hermes('"text"'),
            "<tool_call>\nnot JSON\n</tool_call>",
            '<tool_call>{"name": "get", "reason": ""}</tool_call>',
            f'<tool_call>{{"arguments": {PARIS}}}</tool_call>',
            "a </tool_call> b",
        ),
        # Cut off before and after the call is recognized.
        *no_calls("<tool_cal", "<tool_call>", '<tool_call>\n{"name": "get_wea'),
        (begun, found(("get_weather", '{"city": ', False))),
        (f'{begun}"Par', found(("get_weather", '{"city": "Par', False))),
        (f'{begun}"Paris\\', found(("get_weather", '{"city": "Paris\\', False))),
        (f'{begun}"Paris"}}', found(paris)),
        (f'{begun}"Paris"}}}}\n</tool_', found(paris)),
        # Broken arguments.
        (f"{begun}<1>}}}}", found(("get_weather", '{"city": ', False), "<1>}}")),
        (f"{begun}None}}}}</tool_call> ok", found(("get_weather", '{"city": None}', False), " ok")),
        (f"{begun}1</tool_call>\nok", found(("get_weather", '{"city": 1', False), "\nok")),
        (hermes('{"a": NaN}'), found(("get_weather", '{"a": NaN}', False))),
    ]  # fmt: skip


def coder_texts() -> Texts:
    paris, whole = ("get_weather", PARIS), coder("city>\nParis")
    return [
        (whole, found(paris)),
        (f"Sure.\n{coder('city>Paris')}\n{coder(name='get')}",
         found("Sure.\n", paris, ("get", "{}"))),
        (coder('city>\n  "a"\n\tb\n', "days>\n 3 "),
         found(("get_weather", r'{"city": "  \"a\"\n\tb\n", "days": 3}'))),
        (coder("city>\nnull", "note>\nnull", "is_metric>\nTrue", "share>\n1e-3", "tags>\n[1]"),
         found(("get_weather", '{"city": "null", "note": null, "is_metric": true, "share": 1e-3, '
                               '"tags": [1]}'))),
        (coder("days>\nthree", "days>\n1.5", 'place>\n{"x":\n"é"}', "place>\n{'x'}", "unit>\nC"),
         found(("get_weather", '{"days": "three", "days": "1.5", "place": {"x":\n"é"}, '
                               '"place": "{\'x\'}", "unit": "C"}'))),
        (coder("other>\n5", "is_metric>\n1", "note>\n5", "city>", "city>\n", "city>\n\n"),
         found(("get_weather", '{"other": "5", "is_metric": "1", "note": "5", '
                               r'"city": "", "city": "", "city": "\n"}'))),
        (coder("city>\n<tool_call> </function> <parameter= \n</param"),
         found(("get_weather", r'{"city": "<tool_call> </function> <parameter= \n</param"}'))),
        # Missing tags.
        ("<function=get_weather>\n<parameter=city>\nParis\n</function>", found(paris)),
        ("<function=get_weather>\n<parameter=city>\na\n<parameter=days>\n1\n</parameter></function>",
         found(("get_weather", '{"city": "a", "days": 1}'))),
        (cut(whole, "</function>") + "Done", found(paris, "Done")),
        (f"<tool_call>{coder(name='get')}", found("<tool_call>", ("get", "{}"))),
        *no_calls(
            coder("city>\nParis", name="unknown"),
            "<tool_call>\n<function=get",
            "if a <function=b>:",
        ),
        # Cut short, or broken.
        (cut(whole, "Par"), found(("get_weather", '{"city": "Par', False))),
        (cut(whole, "</para"), found(("get_weather", r'{"city": "Paris\n</para', False))),
        (cut(whole, "</parameter>"), found(("get_weather", '{"city": "Paris"', False))),
        (cut(whole, "</fun"), found(paris)),
        (cut(coder("days>\n12"), "12"), found(("get_weather", '{"days": 12', False))),
        (cut(coder("city>\na", "days>1"), "<parameter=da"),
         found(("get_weather", '{"city": "a"', False))),
        ("<function=get>\n<parameter=x\n</function>",
         found(("get", "{", False), "\n<parameter=x\n</function>")),
        ("<function=get>\nhm</function>", found(("get", "{", False), "\nhm</function>")),
    ]  # fmt: skip


def llama_texts() -> Texts:
    paris, tag = ("get_weather", PARIS), "<|python_tag|>"
    return [
        (llama(PARIS), found(paris)),
        (tag + llama(PARIS), found(paris)),
        (f"{llama(PARIS)}; {llama('{}', 'get')};{llama(HARD)}\n{llama('{}', 'get')}",
         found(paris, ("get", "{}"), ("get_weather", HARD), ("get", "{}"))),
        (f"{tag}{llama(PARIS)}; {tag}{llama(PARIS)}", found(paris, "; ", paris)),
        (f"I call: {llama(PARIS)} now; bye", found("I call: ", paris, " now; bye")),
        (f'{{"type": "function", "name": "get_weather", "arguments": {PARIS} }}', found(paris)),
        (f"{llama(PARIS)};", found(paris, ";")),
        *no_calls(
            f"{tag}print(1)",
            f"{tag}brave_search.call(query={{}})",
            'A user: {"name": "Alice"}',
            '{"name": "get_weather", "description": "?"}',
            '{{}{"a": {"name": 1}}',
            llama("[]"),
            '{"name": "get_weather", "parameters": ',
        ),
        (cut(llama(PARIS), "Pari"), found(("get_weather", '{"city": "Pari', False))),
    ]  # fmt: skip


def mistral_texts() -> Texts:
    paris, mark = ("get_weather", PARIS), "[TOOL_CALLS]"
    listed = f'{{"name": "get_weather", "arguments": {PARIS}'
    return [
        (f"{mark}[{listed}}}]", found(paris)),
        (f'{mark} [{listed}, "id": "abc"}},\n {listed}}}] ', found(paris, paris)),
        (f"{mark}get_weather[ARGS]{HARD}", found(("get_weather", HARD))),
        (f"Hi{mark}get_weather[ARGS]{PARIS}{mark}get[ARGS]{{}}", found("Hi", paris, ("get", "{}"))),
        (f"{mark}get_weather{PARIS}{mark}get [CALL_ID]a1B2c3D4e [ARGS] {{}}.",
         found(paris, ("get", "{}"), ".")),
        (f"{mark}{mark}get{{}}", found(mark, ("get", "{}"))),
        *no_calls(
            f"{mark}nothing[ARGS]{{}}",
            f"{mark}[1, 2] [TOOL_",
            f"{mark}get[ARGS]nothing",
            f"{mark}get[CALL_ID]",
        ),
        # Cut short, or broken.
        (f"{mark}[{listed}}}", found(paris)),
        (f'{mark}[{listed}}}, {{"name": 1}}]', found(paris, ', {"name": 1}]')),
        (f'{mark}get[ARGS]{{"a"', found(("get", '{"a"', False))),
    ]  # fmt: skip


def deepseek_texts() -> Texts:
    paris, begin = ("get_weather", PARIS), "<｜tool▁calls▁begin｜>"
    unfenced = (
        f"{begin}<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>get<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    return [
        (deepseek(PARIS), found(paris)),
        (f"Ok.{deepseek(PARIS, HARD, '{}')}\n",
         found("Ok.", paris, ("get_weather", HARD), ("get_weather", "{}"))),
        (deepseek(PARIS).replace("\n", ""), found(paris)),
        (unfenced, found(paris, ("get", "{}"))),
        (begin + deepseek(PARIS), found(begin, paris)),
        *no_calls(begin, deepseek(PARIS).replace("get_", ""), deepseek("text")),
        # Cut short, or broken.
        (cut(deepseek(PARIS), "\n```<｜tool▁call"), found(paris)),
        (cut(deepseek(PARIS), 'Paris"'), found(("get_weather", '{"city": "Paris"', False))),
        (deepseek('{"city": '), found(("get_weather", '{"city": \n', False))),
    ]  # fmt: skip


def reasoning_cases() -> list[Case]:
    thought = Reasoning("Hm <b>.")

    def case(text: str, *parts: object, form: str = "qwen3", inside: bool = False) -> Case:
        return Case(text, found(*parts), "hermes", form, inside)  # type: ignore[arg-type]

    return [
        case("<think>\nHm <b>.\n</think>\n\nHi\n", thought, "Hi\n"),
        case("\n<think>Hm <b>.</think>Hi", thought, "Hi"),
        case("<think>\n\n</think>\n\nHi", "Hi"),
        case("Hi <think>no</think>", "Hi <think>no</think>"),
        case(" Hi", " Hi"),
        case(" <thin", " <thin"),
        case("</think>Hi", "</think>Hi"),
        case("Hm <b>.\n</think>\nHi", thought, "Hi", inside=True),
        case("\n<think>\nHm <b>.\n</think>\nHi", thought, "Hi", inside=True),
        case("<think>\nHm <b>.\n", thought),
        case("Hm <b>.\n\n", thought, form="deepseek_r1", inside=True),
        case("<think>a\n\nb</thin", Reasoning("a\n\nb</thin")),
        case("<think>\nHm <b>.\n</think>\n\n" + hermes(PARIS), thought, ("get_weather", PARIS)),
        case(f"<think>{hermes(PARIS)}</think>Hi", Reasoning(hermes(PARIS)), "Hi"),
        case("<think>a</think>b</think><think>", Reasoning("a"), "b</think><think>"),
    ]


TEXTS = (hermes_texts(), coder_texts(), llama_texts(), mistral_texts(), deepseek_texts())
CASES = [
    *(Case(*text, form) for form, texts in zip(FORMATS, TEXTS, strict=True) for text in texts),
    *reasoning_cases(),
]
