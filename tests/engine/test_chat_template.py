"""Chat templates: equal to transformers where they work, a RequestError where they do not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from nanovllm.engine.chat_template import ChatTemplate, choose_template
from nanovllm.errors import RequestError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """\
{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
    {{- '<|im_start|>system\\nBe.<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] ~ '<|im_end|>' ~ '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"""
LLAMA = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{% generation %}{% set text = message.content | trim %}
{{ '[%s] ' % message.role ~ text }}{% endgeneration %}
{{ eos_token }}{% if loop.index > 6 %}{% break %}{% endif %}{% endfor %}"""
ODD = """\
{% macro show(value, width=6) %}{{ '%-4d|' % value }}{{ value ** 2 }}
{{ 'ab' * value }}{{ '<&>' | tojson }}
{{- 'x' | center(width) }}{{ 'y'.ljust(width) }}{{ '{:>5}'.format(value) }}{% endmacro %}
{% set ns = namespace(n=0) %}{% for m in messages recursive %}
{% set ns.n = ns.n + 1 %}{{ show(ns.n) }}
{% else %}none{% endfor %}{{ messages | map(attribute='role') | join(',') }}{{ [1] + [2] }}
{{ {'a': [1, 'é']} | tojson(indent=2) }}"""

HELLO = [{"role": "user", "content": "Hello"}]
LONG = [*HELLO, {"role": "assistant", "content": " Hi. "}, {"role": "user", "content": "Bye"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize("messages", [HELLO, LONG], ids=["short", "long"])
@pytest.mark.parametrize("template", [CHATML, LLAMA, ODD], ids=["chatml", "llama", "odd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"tools": [TOOL]},
        {"enable_thinking": False, "bos_token": "<other>"},
        {"continue_final_message": True},
    ],
    ids=str,
)
def test_equals_transformers(template: str, messages: list[Any], options: dict[str, Any]) -> None:
    options = {"add_generation_prompt": False, **options}
    if template is ODD and "continue_final_message" in options:
        pytest.skip("it shows no content")
    variables = {**TOKENS, **options}
    [want], _ = render_jinja_template([messages], chat_template=template, **variables)
    assert ChatTemplate(template).render(messages, **variables) == want


def test_an_answer_is_asked_for_unless_a_message_is_continued() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(HELLO).endswith("assistant\n")
    assert template.render(HELLO, continue_final_message=True).endswith("Hello")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(RequestError, match="mutually exclusive"):
        template.render(HELLO, **both)
    with pytest.raises(RequestError, match="does not render the final message"):
        ChatTemplate("x").render(HELLO, continue_final_message=True)


def test_a_template_is_chosen_by_purpose_or_name() -> None:
    templates = {"default": "plain", "tool_use": "tools", "rag": "documents"}
    assert choose_template(templates) == "plain"
    assert choose_template(templates, has_tools=True) == "tools"
    assert choose_template(templates, "rag", has_tools=True) == "documents"
    assert choose_template(templates, "{{ 1 }}") == "{{ 1 }}"
    assert choose_template("plain", has_tools=True) == "plain"
    with pytest.raises(RequestError, match="chat_template must be one of rag"):
        choose_template({"rag": "x"})


@pytest.mark.parametrize("template", ["\n{% if", "\n{{ 'a' | no_such_filter }}"])
def test_a_template_that_is_none_is_not_said_of_the_messages(template: str) -> None:
    with pytest.raises(RequestError, match="the chat template cannot be parsed, line 2: "):
        ChatTemplate(template)


def test_functions_are_described_as_tools() -> None:
    def add(a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first
            b: The second
        """
        return a + b

    template = "{{ tools[0].function.name }} {{ tools[0].function.parameters.required }}"
    assert ChatTemplate(template).render(HELLO, tools=[add]) == "add ['a', 'b']"
    with pytest.raises(RequestError, match="no JSON schema can be derived"):
        ChatTemplate(template).render(HELLO, tools=[lambda x: x])


FAILING = {
    "refuses": "{{ raise_exception('roles must alternate') }}",
    "syntax": "{% for",
    "unknown tag": "{% fly %}",
    "unknown filter": "{{ 1 | fly }}",
    "type": "{{ messages + 1 }}",
    "none": "{{ None + 'x' }}",
    "undefined": "{{ nope.deeper }}",
    "not callable": "{{ messages() }}",
    "division": "{{ 1 / 0 }}",
    "index": "{{ [].pop() }}",
    "include": "{% include 'x' %}",
    "import": "{% import 'os' as os %}",
    "encoding": "{{ 'x'.encode('no-such') }}",
    "json": "{{ range | tojson }}",
    "sort": "{{ [1, 'a'] | sort }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep source": "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "format reads attributes": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "mutation": "{{ messages.append(1) }}",
    "range": "{{ range(10**9) }}",
}


@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING.keys())
def test_a_template_that_raises_is_a_request_error(template: str) -> None:
    with pytest.raises(RequestError, match="the chat template"):
        ChatTemplate(template).render(HELLO, **TOKENS)


def test_many_threads_render_a_template() -> None:
    messages = HELLO * 200
    variants: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"tools": [TOOL]}]
    wanted = [ChatTemplate(CHATML).render(messages, **each) for each in variants]
    template = ChatTemplate(CHATML)
    with ThreadPoolExecutor(6) as pool:
        rendered = pool.map(lambda options: template.render(messages, **options), variants * 4)
        assert list(rendered) == wanted * 4
