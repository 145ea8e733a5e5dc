"""What callers may pass as prompts, conversations and parameters, brought into one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import require

# One prompt: a text, token ids (a list, a tuple, an array), or a dict with "prompt" or
# "prompt_token_ids" and perhaps a "cache_salt". Several: a list, a tuple or an array of them.
Prompts = Any
Params = SamplingParams | Sequence[SamplingParams] | None
Message = dict[str, Any]
Messages = Sequence[Message] | Sequence[Sequence[Message]]

_CONTENT_KEYS = ("prompt", "prompt_token_ids")
_CALL_KEYS = ("tool_calls", "function_call")  # beside which a message may have no content
_PROMPT_FORM = (
    "a string, token ids (a list, a tuple or an array of integers), or a dict with one of "
    '"prompt" (a string) and "prompt_token_ids" (ids), and perhaps a "cache_salt"'
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in the form that the engine takes."""

    content: str | list[int]
    cache_salt: str | None = None


def split_prompts(prompts: Prompts) -> list[Any]:
    """Return one item per prompt; `as_prompt` reads them one by one, so that a bad one has a place.

    A text is one prompt, not its characters; a sequence of numbers is one prompt of ids.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = _from_array(prompts)
    is_valid = isinstance(items, (list, tuple))
    require(is_valid, "prompts", f"{_PROMPT_FORM}; or several of them", prompts)
    return [items] if items and isinstance(items[0], Number) else list(items)


def as_prompt(prompt: Any, cache_salt: str | None = None) -> Prompt:
    """Read one prompt; a `cache_salt` of its own comes before the call's."""
    content = prompt
    if isinstance(prompt, Mapping):
        given = [key for key in _CONTENT_KEYS if prompt.get(key) is not None]
        is_valid = len(given) == 1 and {*prompt} <= {*_CONTENT_KEYS, "cache_salt"}
        require(is_valid, "prompt", _PROMPT_FORM, prompt)
        own_salt = prompt.get("cache_salt")
        cache_salt = cache_salt if own_salt is None else own_salt
        content = prompt[given[0]]
        require(isinstance(content, str) == (given[0] == "prompt"), "prompt", _PROMPT_FORM, prompt)
    if isinstance(content, str):
        return Prompt(str(content), cache_salt)
    ids = _from_array(content)
    require(isinstance(ids, (list, tuple)), "prompt", _PROMPT_FORM, prompt)
    return Prompt(list(ids), cache_salt)


def at_index(error: RequestError, name: str, index: int, count: int) -> RequestError:
    """Say which one of several an error is about."""
    return (
        error
        if count == 1
        else RequestError(f"{name}[{index}]: {error}", param=name, code=error.code)
    )


def as_conversations(messages: Messages) -> list[list[Message]]:
    """One conversation or a list of them becomes a list; every content becomes a text."""
    is_valid = isinstance(messages, (list, tuple)) and messages
    require(is_valid, "messages", "a list of at least one message", messages)
    if isinstance(messages[0], Mapping):
        return [_as_conversation(messages, "messages")]
    names = (f"messages[{index}]" for index in range(len(messages)))
    return list(map(_as_conversation, messages, names))


def as_params(params: Params, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams serves every prompt; a list must match the prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    is_valid = isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)
    require(is_valid, "sampling_params", "SamplingParams or a list of them", params)
    expected = f"one for each of {num_prompts} prompts"
    require(len(params) == num_prompts, "sampling_params", expected, len(params))
    return list(params)


def _from_array(value: Any) -> Any:
    """Arrays of numpy, torch or the standard library become lists; all have this method."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_conversation(conversation: Any, name: str) -> list[Message]:
    is_valid = isinstance(conversation, (list, tuple)) and conversation
    require(is_valid, name, "a list of at least one message", conversation)
    return [_as_message(message, f"{name}[{i}]") for i, message in enumerate(conversation)]


def _as_message(message: Any, name: str) -> Message:
    is_valid = isinstance(message, Mapping) and isinstance(message.get("role"), str)
    require(is_valid, name, "a dict with a role and content", message)
    content = message.get("content")
    if content is None and any(message.get(key) for key in _CALL_KEYS):
        content = ""
    written = {**message, "content": text_of(content, f"{name}.content")}
    if isinstance(message.get("tool_calls"), (list, tuple)):
        calls = f"{name}.tool_calls"
        written["tool_calls"] = [_as_call(call, calls) for call in message["tool_calls"]]
    return written


def _as_call(call: Any, name: str) -> Any:
    """Parse a tool call's arguments, which OpenAI's API has as a text: templates write the JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    expected = "calls whose arguments are a JSON object"
    require(isinstance(arguments, dict), name, expected, function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def text_of(content: Any, name: str = "content") -> str:
    """A text, or text parts, one per line, as vLLM hands them to templates."""
    if isinstance(content, str):
        return content
    expected = 'a string or a list of text parts, {"type": "text", "text": "..."}'
    require(isinstance(content, (list, tuple)), name, expected, content)
    texts = [_part_text(part) for part in content]
    for part, text in zip(content, texts, strict=True):
        require(isinstance(text, str), name, expected, part)
    return "\n".join(texts)


def _part_text(part: Any) -> Any:
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        return part.get("text")
    return part
