"""What callers may pass as prompts, conversations and parameters, brought into one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams

# One prompt: a text, token ids (a list, a tuple, an array), or a dict with "prompt" or
# "prompt_token_ids" and perhaps a "cache_salt". Several: a list, a tuple or an array of them.
Prompts = Any
Params = SamplingParams | Sequence[SamplingParams] | None
Message = dict[str, Any]
Messages = Sequence[Message] | Sequence[Sequence[Message]]

_CONTENT_KEYS = ("prompt", "prompt_token_ids")
_CALL_KEYS = ("tool_calls", "function_call")  # beside which a message may have no content
_PROMPT_FORMS = (
    "a prompt is a string, token ids (a list, a tuple or an array of integers), or a dict with "
    '"prompt" or "prompt_token_ids"'
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
    if not isinstance(items, (list, tuple)):
        raise RequestError(f"{_PROMPT_FORMS}; or several of them, got {prompts!r:.80}")
    return [items] if items and isinstance(items[0], Number) else list(items)


def as_prompt(prompt: Any, cache_salt: str | None = None) -> Prompt:
    """Read one prompt; a `cache_salt` of its own comes before the call's."""
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in (*_CONTENT_KEYS, "cache_salt")]
        given = [key for key in _CONTENT_KEYS if prompt.get(key) is not None]
        if unknown or len(given) != 1:
            raise RequestError(
                'a prompt dict has one of "prompt" and "prompt_token_ids", and may have a '
                f'"cache_salt"; got {", ".join(map(repr, prompt)) or "none of them"}'
            )
        own_salt = prompt.get("cache_salt")
        cache_salt = cache_salt if own_salt is None else own_salt
        prompt = prompt[given[0]]
        if isinstance(prompt, str) != (given[0] == "prompt"):
            raise RequestError(f'"prompt" is a text and "prompt_token_ids" ids, got {prompt!r:.80}')
    if isinstance(prompt, str):
        return Prompt(str(prompt), cache_salt)
    ids = _from_array(prompt)
    if not isinstance(ids, (list, tuple)):
        raise RequestError(f"{_PROMPT_FORMS}, got {prompt!r:.80}")
    return Prompt(list(ids), cache_salt)


def at_index(error: RequestError, name: str, index: int, count: int) -> RequestError:
    """Say which one of several an error is about."""
    return error if count == 1 else RequestError(f"{name}[{index}]: {error}")


def as_conversations(messages: Messages) -> list[list[Message]]:
    """One conversation or a list of them becomes a list; every content becomes a text."""
    if not isinstance(messages, (list, tuple)):
        raise RequestError(
            f"messages must be a list of dicts with a role and content, got {messages!r:.80}"
        )
    if not messages:
        raise RequestError("the conversation is empty; give it at least one message")
    conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
    return [
        _as_conversation(conversation, f"conversation {index}, " if len(conversations) > 1 else "")
        for index, conversation in enumerate(conversations)
    ]


def as_params(params: Params, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams serves every prompt; a list must match the prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling_params must be SamplingParams or a list, got {params!r:.80}")
    params = list(params)
    if not all(isinstance(param, SamplingParams) for param in params):
        raise RequestError(f"sampling_params must be SamplingParams or a list, got {params!r:.80}")
    if len(params) != num_prompts:
        raise RequestError(f"got {len(params)} SamplingParams for {num_prompts} prompts")
    return params


def _from_array(value: Any) -> Any:
    """Arrays of numpy, torch or the standard library become lists; all have this method."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_conversation(conversation: Any, where: str) -> list[Message]:
    if not isinstance(conversation, (list, tuple)) or not conversation:
        raise RequestError(f"{where}not a list of messages, or an empty one: {conversation!r:.80}")
    return [
        _as_message(message, f"{where}message {index}: ")
        for index, message in enumerate(conversation)
    ]


def _as_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}a message is a dict, got {message!r:.80}")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}a message needs a role, got {message!r:.80}")
    content = message.get("content")
    if content is None and any(message.get(key) for key in _CALL_KEYS):
        content = ""
    written = {**message, "content": text_of(content, where)}
    if isinstance(message.get("tool_calls"), (list, tuple)):
        written["tool_calls"] = [_as_call(call, where) for call in message["tool_calls"]]
    return written


def _as_call(call: Any, where: str) -> Any:
    """Parse a tool call's arguments, which OpenAI's API has as a text: templates write the JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}a tool call's arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{where}a tool call's arguments must be a JSON object, got {arguments!r:.80}"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def text_of(content: Any, where: str = "") -> str:
    """A text, or text parts, one per line, as vLLM hands them to templates."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f"{where}content is a text or a list of text parts, got {content!r:.80} (nothing at "
            "all only where the message calls tools)"
        )
    return "\n".join(_as_part(part, where) for part in content)


def _as_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise RequestError(
        f'{where}only text parts are supported, {{"type": "text", "text": "..."}}, got {part!r:.80}'
    )
