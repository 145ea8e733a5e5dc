"""How one request is sampled and when it stops: frozen and validated once, at construction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling applies temperature, then top_k, top_p on what is left, then min_p."""

    temperature: float = 1.0  # 0 is greedy
    max_tokens: int = 64
    ignore_eos: bool = False
    top_k: int = 0  # 0 or -1: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._check_numbers()
        self._check_stops()

    def _check_numbers(self) -> None:
        _require("temperature", self.temperature, "a finite number >= 0", _is_finite, 0)
        _require("top_p", self.top_p, "a number in (0, 1]", _is_finite, 0, 1)
        if self.top_p == 0:
            raise ConfigError(
                "top_p must be a number in (0, 1], got 0; use temperature=0 for greedy"
            )
        _require("min_p", self.min_p, "a number in [0, 1]", _is_finite, 0, 1)
        _require("top_k", self.top_k, "an integer >= 1, or 0 or -1 for no limit", _is_int, 0)
        _require("max_tokens", self.max_tokens, "an integer >= 1", _is_int, 1)
        limit = f"an integer in [0, max_tokens={self.max_tokens}]"
        _require("min_tokens", self.min_tokens, limit, _is_int, 0, self.max_tokens)
        if self.seed is not None:
            _require("seed", self.seed, "an integer of at most 64 bits", _is_int, -(2**63), 2**64)

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop must hold non-empty strings, got {text!r}")
        for token_id in self.stop_token_ids:
            _require("stop_token_ids", token_id, "a list of integers >= 0", _is_int, 0)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(name, value, expected, is_valid, low, high=math.inf) -> None:  # type: ignore[no-untyped-def]
    if not is_valid(value) or not low <= value <= high:
        raise ConfigError(f"{name} must be {expected}, got {value!r}")
