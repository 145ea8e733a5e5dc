"""How a server behaves; what its engine does is in EngineConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.sampling_params import SamplingParams

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    model_names: tuple[str, ...]  # that requests may ask for; the first is shown
    api_keys: tuple[str, ...] = ()  # none: whoever reaches the port is served
    is_local: bool = False  # refuse requests whose Host is not this machine
    allowed_origins: tuple[str, ...] = ()  # whose pages may call this server from a browser
    max_body_bytes: int = 32 * 2**20
    max_queued_requests: int = 2048
    limit_concurrency: int | None = None  # HTTP requests under way at once
    request_timeout: float | None = None  # seconds for a whole answer
    shutdown_timeout: float = 10.0  # seconds for answers that are under way
    chat_template: str | None = None  # in place of the model's own
    tool_parser: str | None = None  # None: the one that the chat template writes for
    reasoning_parser: str | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    metrics_prefix: str = "vllm:"
    root_path: str = ""


def sampling_in(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults for sampling that a model's generation_config.json has."""
    found = {name: generation_config.get(name) for name in SAMPLING_NAMES}
    defaults = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except ConfigError as error:
        raise ConfigError(
            f"generation_config.json: {error}; --generation-config vllm does without it"
        ) from error
    return defaults
