"""Chat templates: equal to transformers where they work, a RequestError where they do not."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from nanovllm.chat_template import MAX_LENGTH, MAX_ROUNDS, ChatTemplate, Program
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
    assert ChatTemplate(template, TOKENS, **options).render(messages) == want


def test_an_answer_is_asked_for_unless_a_message_is_continued() -> None:
    assert ChatTemplate(CHATML, {}).render(HELLO).endswith("assistant\n")
    assert ChatTemplate(CHATML, {}, continue_final_message=True).render(HELLO).endswith("Hello")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(RequestError, match="either continued or answered"):
        ChatTemplate(CHATML, {}, **both)
    with pytest.raises(RequestError, match="does not show the message"):
        ChatTemplate("x", {}, continue_final_message=True).render(HELLO)


@pytest.mark.parametrize(
    "options", [{"tokenize": False}, {"max_length": 3, "truncation": True}, {"return_dict": True}]
)
def test_what_a_template_cannot_see_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"no option {min(options)}"):
        ChatTemplate(CHATML, {}, **options)


def test_a_template_is_chosen_by_purpose_or_name() -> None:
    templates = {"default": "plain", "tool_use": "tools", "rag": "documents"}
    assert ChatTemplate(templates, {}).render(HELLO) == "plain"
    assert ChatTemplate(templates, {}, tools=[TOOL]).render(HELLO) == "tools"
    assert ChatTemplate(templates, {}, chat_template="rag").render(HELLO) == "documents"
    assert ChatTemplate(templates, {}, chat_template="{{ 1 }}").render(HELLO) == "1"
    with pytest.raises(RequestError, match="rag; choose with chat_template="):
        ChatTemplate({"rag": "x"}, {})


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (5, {}),
        (["x"], {}),
        ({"default": 5}, {}),
        ("x", {"chat_template": 5}),
        ("x", {"chat_template": ["x"]}),
        ("x", {"tools": 5}),
        ("x", {"tools": "f"}),
        ("x", {"tools": [5]}),
    ],
    ids=repr,
)
def test_other_types_are_refused(template: Any, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(template, {}, **options)


@pytest.mark.parametrize("template", ["\n{% if", "\n{{ 'a' | no_such_filter }}"])
def test_a_template_that_is_none_is_not_said_of_the_messages(template: str) -> None:
    with pytest.raises(RequestError, match="the chat template cannot be read, line 2: "):
        ChatTemplate(template, TOKENS)


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
    assert ChatTemplate(template, {}, tools=[add]).render(HELLO) == "add ['a', 'b']"
    with pytest.raises(RequestError, match="cannot be described"):
        ChatTemplate(template, {}, tools=[lambda x: x])


DOUBLING = (
    "{%% set n = namespace(x='xxxxxxxx') %%}{%% for i in range(99) %%}"
    "{%% set n.x = %s %%}{%% endfor %%}"
)
HOSTILE = {
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
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": "{% for i in 'a' * 10**6 %}{% endfor %}",
    "endless output": "{% for i in range(9999) %}{{ 'a' * 10**6 }}{% endfor %}",
    "product": "{{ 'a' * 10**12 }}",
    "product of lists": "{{ 10**10 * [1] }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "large numbers": "{% set n = namespace(x=7) %}{% for i in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "sums": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "joins": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "padding": "{{ 'a'.ljust(10**11) }}",
    "centering": "{{ 'a' | center(10**11) }}",
    "indent": "{{ [1] | tojson(indent=10**11) }}",
    "wide format": "{{ '%99999999999d' % 1 }}",
    "wide format by number": "{{ '%*d' % (10**11, 1) }}",
    "wide new format": "{{ '{:99999999999}'.format(1) }}",
    "wide new format by number": "{{ '{:{}}'.format(1, 10**11) }}",
    "wide filter": "{{ '%99999999999d' | format(1) }}",
    "wide format by name": "{{ '%(x)99999999999d' % {'x': 1} }}",
    "many wide formats": "{{ ('%9999999d' * 1000) % ((1,) * 1000) }}",
    "doubling by %": DOUBLING % "'%s%s' % (n.x, n.x)",
    "doubling by format": DOUBLING % "'{}{}'.format(n.x, n.x)",
    "doubling by list": DOUBLING % "[n.x, n.x] | string",
    "list of long texts joined": "{{ (['x' * 16000000] * 40) | join }}",
    "joined by a method": "{{ ''.join(['x' * 16000000] * 40) }}",
    "joined one by one": "{{ (['x' * 16000000] * 40) | map('upper') | join }}",
    "long separator": "{{ range(9999) | join('x' * 9999999) }}",
    "replace": "{{ ('x' * 50000) | replace('x', 'y' * 10000) }}",
    "replace by a method": "{{ ('x' * 50000).replace('x', 'y' * 10000) }}",
    "translate": "{{ ('x' * 50000).translate({120: 'y' * 10000}) }}",
    "wide bytes": "{{ (1).to_bytes(10**11, 'big') }}",
    "indented lines": "{{ ('\\n' * 50000) | indent(50000, blank=True) }}",
    "nested lists as JSON": "{% set x = ['x' * 1000] * 800 %}{{ ([x] * 512) | tojson }}",
    "deep indent": "{{ [[[1] * 9] * 999] | tojson(indent=999999) }}",
    "printed list": "{{ ['x' * 16000000] * 40 }}",
    "printed namespace": "{{ namespace(x=['x' * 16000000] * 40) }}",
    "list with ~": "{{ 'x' ~ ['x' * 16000000] * 40 }}",
    "kept slices": "{% set n = namespace(x=[]) %}{% set x = 'x' * 16000000 %}"
    "{% for i in range(9999) %}{% set n.x = n.x + [x[1:]] %}{% endfor %}",
    "text in a macro": "{% macro f() %}{% for i in range(99999) %}"
    + "x" * 99999
    + "{% endfor %}{% endmacro %}{% set x = f() %}",
    "value in a macro": "{% set x = 'x' * 16000000 %}{% macro f() %}{% for i in range(9999) %}"
    "{{ x }}{% endfor %}{% endmacro %}{% set y = f() %}",
    "doubling macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(99) }}",
    "sum of lists": "{{ ([[1] * 100] * 100000) | sum(start=[]) }}",
    "filler text": "{{ lipsum(n=10**7) }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_a_request_error(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.chat_template.MAX_ROUNDS", MAX_ROUNDS // 20)  # in less time
    check_refused(template)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loops", "loops over text", "doubling macro"])
def test_every_round_that_is_allowed_takes_seconds(name: str) -> None:
    check_refused(HOSTILE[name])


def check_refused(template: str) -> None:
    start = time.thread_time()
    with pytest.raises(RequestError, match="the chat template") as error:
        ChatTemplate(template, TOKENS).render(HELLO)
    assert not isinstance(error.value.__cause__, MemoryError)
    assert time.thread_time() - start < 30


def test_a_program_is_compiled_once_and_run_by_many_threads() -> None:
    compile_source = functools.cache(Program)
    messages = HELLO * 200
    variants: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"tools": [TOOL]}]
    wanted = [ChatTemplate(CHATML, TOKENS, **each).render(messages) for each in variants]

    def render(options: dict[str, Any]) -> str:
        return ChatTemplate(CHATML, TOKENS, compile_source, **options).render(messages)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(render, variants * 4)) == wanted * 4
    assert compile_source.cache_info().currsize == 1


def test_limits_leave_room_for_long_conversations() -> None:
    """And they hold per conversation, not for all that a template ever formats."""
    messages = HELLO * (MAX_ROUNDS // 100)
    template = ChatTemplate(CHATML, TOKENS)
    texts = {template.render(messages) for _ in range(3)}
    assert len(texts) == 1
    long = [{"role": "user", "content": "x" * (MAX_LENGTH // 2)}]
    assert len(template.render(long)) > MAX_LENGTH // 2
