"""SamplingParams: how a request is sampled and when it stops, validated at construction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.logits_options import as_bias, as_processors
from nanovllm.structured_outputs import check_structured
from nanovllm.validation import as_python, check_types, option, require, suggest_fields

MAX_LOGPROBS = 100  # maximum top logprobs per position
MAX_SAMPLES = 10_000  # maximum completions per prompt
RANGES = {
    "temperature": (0, 100),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
NO_LIMIT = 2**31 - 1
NO_TOKEN = -1  # in place of a token: none was valid, or the draft model has not chosen it yet


@suggest_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options that control sampling and stopping.

    Sampling applies temperature, then top_k, then top_p to the tokens that are left, then min_p.
    Before that, the logits are edited: forbidden tokens are masked, biases are added, penalties
    lower the logits of output tokens (the repetition penalty also those of prompt tokens), and
    then `logits_processors` run. See docs/offline.md.
    """

    temperature: float = option(1.0, "0 is greedy; higher values give more varied output")
    max_tokens: int | None = option(
        64, "maximum number of output tokens", unset="the rest of the context"
    )
    ignore_eos: bool = option(False, "continue past the end-of-sequence token")
    top_k: int = option(0, "sample from this many of the most likely tokens; 0 for all")
    top_p: float = option(1.0, "sample from the most likely tokens with this total probability")
    min_p: float = option(
        0.0, "drop tokens whose probability is below this fraction of the most likely one's"
    )
    seed: int | None = option(
        None, "makes sampling reproducible", unset="derived from the engine's seed"
    )
    stop: str | Iterable[str] = option((), "stop before any of these strings")
    stop_token_ids: Iterable[int] = option((), "stop at any of these tokens")
    min_tokens: int = option(0, "minimum number of output tokens before a stop condition applies")
    skip_special_tokens: bool = option(True, "omit special tokens from the text")
    presence_penalty: float = option(
        0.0, "subtracted from the logits of tokens that are in the output"
    )
    frequency_penalty: float = option(
        0.0, "subtracted from a token's logit for each of its occurrences in the output"
    )
    repetition_penalty: float = option(
        1.0, "reduces the logits of tokens that are in the prompt or the output"
    )
    logit_bias: Mapping[int, float] | None = option(
        None, "values to add to logits, keyed by token id", hash=False
    )
    allowed_token_ids: Iterable[int] | None = option(None, "sample only these tokens", unset="all")
    bad_words: Iterable[str] = option(
        (), "never generate these words, with or without a leading space"
    )
    include_stop_str_in_output: bool = option(False, "keep the stop string in the text")
    truncate_prompt_tokens: int | None = option(
        None, "keep only this many tokens, from the end of the prompt"
    )
    priority: int = option(0, "lower values are scheduled first")
    n: int = option(1, "number of completions; completion i uses seed + i")
    logprobs: int | None = option(None, "return output logprobs, with this many top logprobs each")
    prompt_logprobs: int | None = option(None, "the same for prompt tokens")
    logits_processors: Iterable[Callable[..., Any] | str] = option(
        (), "functions that modify logits, or their names as 'module:function'"
    )
    structured_outputs: Mapping[str, Any] | None = option(
        None, "constrain the output to a JSON schema, regex, choice or grammar", hash=False
    )

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop, str))
        object.__setattr__(self, "bad_words", _as_tuple("bad_words", self.bad_words, str))
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids, int)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        if self.allowed_token_ids is not None:
            allowed = _as_tuple("allowed_token_ids", self.allowed_token_ids, int)
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", as_bias(self.logit_bias))
        if self.logits_processors != ():
            processors = as_processors(self.logits_processors)
            object.__setattr__(self, "logits_processors", processors)
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._check_ranges()
        if self.structured_outputs is not None:
            checked = check_structured(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", checked)

    @property
    def max_new_tokens(self) -> int:
        """`max_tokens`; if it is None, a number larger than any context."""
        return NO_LIMIT if self.max_tokens is None else self.max_tokens

    @property
    def is_plain(self) -> bool:
        """Whether no option edits the logits or requests logprobs."""
        return not (
            self.can_exclude_tokens
            or self.has_penalties
            or self.logit_bias
            or self.logprobs is not None
            or self.prompt_logprobs is not None
        )

    @property
    def has_penalties(self) -> bool:
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0)

    @property
    def can_exclude_tokens(self) -> bool:
        """Whether these options can mask tokens, and so may leave no token to sample."""
        return bool(
            self.allowed_token_ids
            or self.bad_words
            or self.min_tokens
            or self.logits_processors
            or self.structured_outputs
        )

    def _check_ranges(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            self._require(name, value is None or low <= value <= high, f"in [{low}, {high}]")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]; temperature=0 is greedy")
        self._require("top_k", self.top_k >= 0, "at least 1, or 0 or -1 for no limit")
        fits = self.max_new_tokens >= (1 if self.prompt_logprobs is None else 0)
        self._require("max_tokens", fits, "at least 1, or 0 with prompt_logprobs")
        fits = 0 <= self.min_tokens <= self.max_new_tokens
        self._require("min_tokens", fits, f"in [0, max_tokens={self.max_tokens}]")
        is_64_bit = self.seed is None or -(2**63) <= self.seed < 2**64
        self._require("seed", is_64_bit, "an integer of at most 64 bits")
        for name in ("stop", "bad_words"):
            self._require(name, all(getattr(self, name)), "non-empty strings")
        self._require("stop_token_ids", min(self.stop_token_ids, default=0) >= 0, "at least 0")
        bias: Mapping[int, float] = self.logit_bias or {}
        is_valid = all(key >= 0 and -100 <= value <= 100 for key, value in bias.items())
        self._require("logit_bias", is_valid, "numbers in [-100, 100] keyed by token id")
        allowed = self.allowed_token_ids
        is_valid = allowed is None or min(allowed, default=-1) >= 0
        self._require("allowed_token_ids", is_valid, "at least one id, none below 0")
        most = MAX_SAMPLES if self.max_tokens != 0 else 1
        self._require("n", 1 <= self.n <= most, f"in [1, {MAX_SAMPLES}], and 1 with max_tokens=0")
        length = self.truncate_prompt_tokens
        self._require("truncate_prompt_tokens", length is None or length >= 1, "at least 1")

    def _require(self, name: str, is_valid: bool, expected: str) -> None:
        require(is_valid, name, expected, getattr(self, name), ConfigError)


def _as_tuple(name: str, value: Any, item_type: type) -> tuple[Any, ...]:
    """Convert a string, None or any iterable of items to a tuple."""
    if type(value) is tuple and not value:  # fast path for the default
        return ()
    items = (value,) if isinstance(value, str) else () if value is None else value
    items = tuple(map(as_python, items)) if isinstance(items, Iterable) else (None,)
    is_valid = all(isinstance(item, item_type) and not isinstance(item, bool) for item in items)
    require(is_valid, name, f"items of type {item_type.__name__}", value, ConfigError)
    return items
