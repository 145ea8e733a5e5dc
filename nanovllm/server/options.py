"""How a server behaves; what its engine does is in EngineConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerOptions:
    model_names: tuple[str, ...]  # that requests may ask for; the first is shown
    api_keys: tuple[str, ...] = ()  # none: whoever reaches the port is served
    max_body_bytes: int = 32 * 2**20
    max_queued_requests: int = 2048
    request_timeout: float | None = None  # seconds for a whole answer
    shutdown_timeout: float = 10.0  # seconds for answers that are under way
    chat_template: str | None = None  # in place of the model's own
    tool_parser: str | None = None  # None: the one that the chat template writes for
    reasoning_parser: str | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    metrics_prefix: str = "vllm:"
    root_path: str = ""
