"""SpeculativeConfig: the options of speculative decoding, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from nanovllm.errors import ConfigError
from nanovllm.validation import check_choices, require

MAX_SPECULATIVE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The content of `EngineConfig.speculative_config`, with vLLM's field names."""

    method: Literal["ngram", "suffix", "draft_model"]
    num_speculative_tokens: int = 7
    model: str | None = None  # only for "draft_model"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """Check the options and return them as a record."""
        require(isinstance(options, Mapping), "speculative_config", "a dict", options, ConfigError)
        names = [each.name for each in fields(cls)]
        for name in options:
            require(name in names, "speculative_config", f"a dict of {names}", name, ConfigError)
        config = cls(**{"method": None, **options})
        check_choices(config)
        has_model = isinstance(config.model, str) and config.model != ""
        is_needed = config.method == "draft_model"
        expected = "a hub id or a folder" if is_needed else "given only with method draft_model"
        is_given = has_model if is_needed else config.model is None
        require(is_given, "speculative_config model", expected, config.model, ConfigError)
        count = config.num_speculative_tokens
        is_count = type(count) is int and 1 <= count <= MAX_SPECULATIVE_TOKENS
        expected = f"between 1 and {MAX_SPECULATIVE_TOKENS}"
        require(is_count, "num_speculative_tokens", expected, count, ConfigError)
        return config
