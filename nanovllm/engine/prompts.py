"""What callers may pass as prompts and parameters, brought into one form."""

from __future__ import annotations

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

_CONTENT_KEYS = ("prompt", "prompt_token_ids")
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
