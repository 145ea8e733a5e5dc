"""Normalize the prompts and parameters that callers pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from numbers import Number
from typing import Any

from nanovllm.engine.engine_options import TEXT_ONLY
from nanovllm.engine.images import ImageSource, images_of
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import require

# One prompt is a string, token ids (a list, tuple or array), or a dict with "prompt" or
# "prompt_token_ids", and optionally "cache_salt" and "multi_modal_data". Several are a list, tuple
# or array of prompts.
Prompts = Any
Params = SamplingParams | Sequence[SamplingParams] | None

_CONTENT_KEYS = ("prompt", "prompt_token_ids")
_PROMPT_FORM = (
    "a string, token ids (a list, tuple or array of integers), or a dict with either "
    '"prompt" (a string) or "prompt_token_ids", and optionally "cache_salt" and '
    '"multi_modal_data"'
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in normalized form."""

    content: str | list[int]
    cache_salt: str | None = None
    images: tuple[ImageSource, ...] = ()


def split_prompts(prompts: Prompts) -> list[Any]:
    """Return one item per prompt; `as_prompt` validates each, so that errors can name its index.

    A string or a sequence of numbers (token ids) is one prompt.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = _from_array(prompts)
    is_valid = isinstance(items, (list, tuple))
    require(is_valid, "prompts", f"{_PROMPT_FORM}; or a list of such prompts", prompts)
    return [items] if items and isinstance(items[0], Number) else list(items)


def as_prompt(
    prompt: Any, cache_salt: str | None = None, image_refusal: str | None = TEXT_ONLY
) -> Prompt:
    """Normalize one prompt; its own `cache_salt` overrides that of the call.

    Images are refused for the reason `image_refusal`, if any.
    """
    content, images = prompt, tuple[ImageSource, ...]()
    if isinstance(prompt, Mapping):
        given = [key for key in _CONTENT_KEYS if prompt.get(key) is not None]
        if prompt.get("multi_modal_data"):
            if image_refusal is not None:
                raise RequestError(f"multi_modal_data: {image_refusal}", param="prompt")
            images = images_of(prompt["multi_modal_data"])
        optional = ("cache_salt", "multi_modal_data") if images else ("cache_salt",)
        is_valid = len(given) == 1 and {*prompt} <= {*_CONTENT_KEYS, *optional}
        require(is_valid, "prompt", _PROMPT_FORM, prompt)
        own_salt = prompt.get("cache_salt")
        cache_salt = cache_salt if own_salt is None else own_salt
        content = prompt[given[0]]
        require(isinstance(content, str) == (given[0] == "prompt"), "prompt", _PROMPT_FORM, prompt)
    if isinstance(content, str):
        return Prompt(str(content), cache_salt, images)
    ids = _from_array(content)
    require(isinstance(ids, (list, tuple)), "prompt", _PROMPT_FORM, prompt)
    return Prompt(list(ids), cache_salt, images)


def as_params(params: Params, num_prompts: int) -> list[SamplingParams]:
    """Return one SamplingParams per prompt, given one for all prompts or a list."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    is_valid = isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)
    require(is_valid, "sampling_params", "SamplingParams or a list of them", params)
    expected = f"one for each of {num_prompts} prompts"
    require(len(params) == num_prompts, "sampling_params", expected, len(params))
    return list(params)


def with_params(
    prompts: Iterable[Any], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[tuple[Any, SamplingParams]]:
    """Pair each prompt with its parameters, lazily; a string or a dict is one prompt."""
    prompts = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
    params = SamplingParams() if params is None else params
    each = repeat(params) if isinstance(params, SamplingParams) else iter(params)
    for index, prompt in enumerate(prompts):
        own = next(each, None)
        if not isinstance(own, SamplingParams):
            raise RequestError(
                "sampling_params must be one SamplingParams, or one for each prompt, got "
                f"{own!r:.80} for prompts[{index}]"
            )
        yield prompt, own


def _from_array(value: Any) -> Any:
    """Convert a numpy, torch or standard-library array to a list; all have `tolist`."""
    return value.tolist() if hasattr(value, "tolist") else value
