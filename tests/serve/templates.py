"""Chat templates with the tool-call and reasoning formats of well-known models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).parent / "chat_templates"


def read_template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


# The formats that must be detected for each template: of tool calls, and of reasoning.
FORMATS: dict[str, tuple[str | None, str | None]] = {
    "qwen3": ("hermes", "qwen3"),
    "qwen3_coder": ("qwen3_coder", None),
    "llama3": ("llama3_json", None),
    "mistral_list": ("mistral", None),
    "mistral_args": ("mistral", None),
    "deepseek_v3": ("deepseek_v3", None),
    "deepseek_v31": ("deepseek_v3", "deepseek_r1"),
    "chatml": (None, None),
    # Encloses calls in the same tags as other templates, but keys and values in additional tags.
    "arg_keys": (None, None),
}
TEMPLATES = {name: (read_template(name), *formats) for name, formats in FORMATS.items()}
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
