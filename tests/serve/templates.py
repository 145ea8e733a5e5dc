"""Chat templates with the tool-call and reasoning formats of well-known models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jinja2

QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n' }}
{{- '</tool_call> for each call.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{% endif %}"""

QWEN3_CODER = """\
{%- if tools %}{{- '<|im_start|>system\\nCall so:\\n<tool_call>\\n<function=name>\\n' }}
{{- '<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}{{- '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nRespond in the format ' }}
{{- '{"name": function name, "parameters": dictionary of names and values}<|eot_id|>' }}{% endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{% if not loop.first %}{{- '; ' }}{% endif %}
{{- '{"name": "' + call.function.name + '", "parameters": ' }}
{{- (call.function.arguments | tojson) + '}' }}{% endfor %}{{- '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL_LIST = """\
{{- bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}{% else %}{{- message.content }}
{%- if message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{% if not loop.first %}{{- ', ' }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}' }}{% endfor %}{{- ']' }}{% endif %}
{{- eos_token }}{% endif %}{% endfor %}"""

MISTRAL_ARGS = """\
{{- bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{{- '[INST]' + message.content + '[/INST]' }}{% else %}{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{- eos_token }}{% endif %}{% endfor %}"""

DEEPSEEK_V3 = """\
{{- bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}{% else %}{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- (call.function.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}
{%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}"""

DEEPSEEK_V31 = """\
{{- bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}
{{- '<think>' if thinking else '</think>' }}{% else %}
{%- if message.reasoning_content %}{{- message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if loop.first %}{{- '<｜tool▁calls▁begin｜>' }}{% endif %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- (call.function.arguments | tojson) + '<｜tool▁call▁end｜>' }}
{%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}"""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# Encloses calls in the same tags as other templates, but keys and values in additional tags.
ARG_KEYS = """\
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key><arg_value>' + (value | tojson) + '</arg_value>' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}{% endfor %}"""

# The formats that must be detected for each template.
TEMPLATES: dict[str, tuple[str, str | None, str | None]] = {
    "qwen3": (QWEN3, "hermes", "qwen3"),
    "qwen3_coder": (QWEN3_CODER, "qwen3_coder", None),
    "llama3": (LLAMA3, "llama3_json", None),
    "mistral_list": (MISTRAL_LIST, "mistral", None),
    "mistral_args": (MISTRAL_ARGS, "mistral", None),
    "deepseek_v3": (DEEPSEEK_V3, "deepseek_v3", None),
    "deepseek_v31": (DEEPSEEK_V31, "deepseek_v3", "deepseek_r1"),
    "chatml": (CHATML, None, None),
    "arg_keys": (ARG_KEYS, None, None),
}
WITH_TOOLS = [name for name, (_, tools, _) in TEMPLATES.items() if tools is not None]
QUESTION = {"role": "user", "content": "What is <think>, and how is <tool_call> spelt?"}


@cache
def compile_template(template: str) -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template)


def render(template: str, messages: Sequence[Any], **options: Any) -> str:
    program = compile_template(template)
    return program.render(messages=messages, tools=[{}], bos_token="", eos_token="", **options)


def prompt_of(template: str, **options: Any) -> str:
    return render(template, [QUESTION], add_generation_prompt=True, **options)


def answer_of(template: str, message: dict[str, Any], **options: Any) -> str:
    """Return the output of a model that writes a message as its template does."""
    whole = render(template, [QUESTION, {"role": "assistant", **message}], **options)
    answer = whole.removeprefix(prompt_of(template, **options))
    assert answer != whole
    for end in ("<|im_end|>\n", "<|eot_id|>"):
        answer = answer.removesuffix(end)
    return answer


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
