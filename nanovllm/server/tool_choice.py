"""Which tools a model may call in an answer, and what its answer is constrained to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.grammar.forms import enforced_json
from nanovllm.grammar.limits import run_bounded
from nanovllm.server.errors import ApiError
from nanovllm.server.openai_records import AllowedTools, ChatRequest, NamedTool
from nanovllm.server.parsing.formats import ReasoningFormat
from nanovllm.server.parsing.grammar import CallRules, tool_grammar
from nanovllm.server.parsing.tools import Tool, read_tools
from nanovllm.server.service import Service


def callable_tools(service: Service, request: ChatRequest) -> list[Tool]:
    """Check the tools of a request; return those that may be called."""
    choice = request.tool_choice or ("auto" if request.tools else "none")
    if choice == "none":
        return []
    if not request.tools:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if service.formats.tools is None:
        raise ApiError(
            "this model's chat template writes no tool calls that are known here; name their "
            "format with --tool-call-parser, or leave out tools",
            param="tools",
        )
    if "tools" not in service.template_text:
        raise ApiError(
            "this model's chat template does not show tools to the model; give one that does with "
            "--chat-template, or leave out tools",
            param="tools",
        )
    tools = read_tools(request.tools)
    if isinstance(choice, str):
        return tools
    chosen = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
    names = [each.function.name for each in chosen]
    for name in names:
        if all(tool.name != name for tool in tools):
            raise ApiError(f"tool_choice names {name!r}, which is no tool", param="tool_choice")
    return [tool for tool in tools if tool.name in names]


def answer_constraint(
    service: Service, request: ChatRequest, tools: list[Tool], prompt: str, is_open: bool
) -> Mapping[str, Any] | None:
    """What the answer must be, as `structured_outputs` has it: the calls, or what was asked for.

    An answer that `is_open` begins inside reasoning. Takes a while: not for the event loop.
    """
    reasoning = service.formats.reasoning
    if reasoning is not None and prompt.rstrip().endswith(reasoning.end):
        reasoning = None  # the prompt has ended it
    asked = request.constraint()
    must_call = request.must_call
    is_parallel = request.parallel_tool_calls is not False
    if isinstance(request.tool_choice, NamedTool):  # one call, as elsewhere, unless told otherwise
        is_parallel = request.parallel_tool_calls is True
    is_held = must_call or isinstance(request.tool_choice, AllowedTools) or not is_parallel
    if not tools or not (is_held or any(tool.is_strict for tool in tools)):
        if asked is None or reasoning is None or "after" in asked:
            return asked
        opening = {} if is_open else {"opened_by": reasoning.begin}
        return {**opening, "after": reasoning.end, **asked}
    if asked is not None:
        raise ApiError("an answer cannot be held to a format and to calls of tools at once")
    return {
        "grammar": run_bounded(
            _call_grammar, service, tools, reasoning, is_open, must_call, is_parallel
        )
    }


def _call_grammar(
    service: Service,
    tools: list[Tool],
    reasoning: ReasoningFormat | None,
    is_open: bool,
    must_call: bool,
    is_parallel: bool,
) -> str:
    assert service.formats.tools is not None
    rules = CallRules(
        must_call,
        is_parallel,
        reasoning,
        is_open,
        service.special_ids,
        enforced_json,
    )
    return tool_grammar(service.formats.tools, tools, rules)
