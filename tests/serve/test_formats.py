"""Formats are detected from chat templates, and parse what these templates write."""

from __future__ import annotations

import json

import pytest

from nanovllm.errors import ConfigError
from nanovllm.serve.parsing.events import BlockDelta, BlockStart, BlockStop
from nanovllm.serve.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, choose_formats
from nanovllm.serve.parsing.parser import OutputParser
from tests.serve.output_cases import FORMATS, TOOLS, Reasoning, found
from tests.serve.templates import TEMPLATES, WITH_TOOLS, answer_of, call, prompt_of

CALLS = [
    ("get_weather", {"city": 'Zürich "HB"\n\t', "days": 2, "tags": [{"a": None}, "b"]}),
    ("get", {}),
    ("get_weather", {"city": "</tool_call> [TOOL_CALLS]", "is_metric": True}),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_say_their_formats(name: str) -> None:
    template, tools, reasoning = TEMPLATES[name]
    formats = choose_formats(template)
    assert (formats.tools.name if formats.tools else None) == tools
    assert (formats.reasoning.name if formats.reasoning else None) == reasoning


def test_names_override_templates() -> None:
    formats = choose_formats(TEMPLATES["qwen3"][0], "mistral", "deepseek_r1")
    assert formats.tools is not None
    assert formats.reasoning is not None
    assert (formats.tools.name, formats.reasoning.name) == ("mistral", "deepseek_r1")


def test_unknown_names_are_errors_that_list_the_known() -> None:
    assert {each.name for each in TOOL_FORMATS} == set(FORMATS)
    with pytest.raises(ConfigError, match=r"'pythonic'.*hermes"):
        choose_formats("", tool_parser="pythonic")
    with pytest.raises(ConfigError, match=r"'gpt'.*qwen3"):
        choose_formats("", reasoning_parser="gpt")


@pytest.mark.parametrize("content", ["", "Let me look."])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_what_a_template_writes_is_read_back(name: str, content: str) -> None:
    template = TEMPLATES[name][0]
    message = {"content": content, "tool_calls": [call(*each) for each in CALLS]}
    formats = choose_formats(template)
    text = answer_of(template, message)
    parser = OutputParser(TOOLS, formats.tools)
    events = [*parser.feed(text), *parser.finish()]
    deltas = [event for event in events if isinstance(event, BlockDelta)]
    assert "".join(each.text for each in deltas if each.kind == "text").strip() == content
    names = [event.name for event in events if isinstance(event, BlockStart) and event.name]
    arguments = [json.loads(each.text) for each in deltas if each.kind == "tool_call"]
    assert list(zip(names, arguments, strict=True)) == CALLS
    assert all(event.is_complete for event in events if isinstance(event, BlockStop))


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v31"])
def test_reasoning_that_a_template_writes_is_read_back(name: str) -> None:
    template = TEMPLATES[name][0]
    message = {"content": "Hi", "reasoning_content": "Hm.\n\nWell."}
    form = choose_formats(template).reasoning
    assert form is not None
    is_open = form.is_open(prompt_of(template, thinking=True))
    parser = OutputParser((), None, form, is_open)
    events = [*parser.feed(answer_of(template, message, thinking=True)), *parser.finish()]
    assert events == list(found(Reasoning("Hm.\n\nWell."), "Hi"))


def test_prompts_say_whether_reasoning_is_open() -> None:
    qwen, deepseek = TEMPLATES["qwen3"][0], TEMPLATES["deepseek_v31"][0]
    for form in REASONING_FORMATS:
        assert not form.is_open(prompt_of(qwen))
        assert not form.is_open(prompt_of(qwen, enable_thinking=False))
        assert form.is_open(prompt_of(qwen) + "<think>\n")
        assert form.is_open(prompt_of(qwen), "\n<think>Hm")
        assert not form.is_open(prompt_of(qwen), "<think>Hm</think>\n")
        assert not form.is_open(prompt_of(qwen), "What is <think>?")
        assert form.is_open(prompt_of(deepseek, thinking=True))
        assert not form.is_open(prompt_of(deepseek, thinking=False))
