"""What crosses between the ingress and the engines of an application of Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.async_llm import GUESSED_TOKENS
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import NanovllmError
from nanovllm.sampling_params import SamplingParams
from nanovllm.serving.core_records import CoreStats


@dataclass(frozen=True, slots=True)
class Call:
    """A prompt for any engine, or no prompt for one of them; the router sees it too."""

    token_ids: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str | None = None
    is_streaming: bool = False
    engine_id: str | None = None  # whose alone this is

    @property
    def num_tokens(self) -> int:
        """Those of the prompt, and what its answers may have."""
        return len(self.token_ids) + self.params.n * min(self.params.max_new_tokens, GUESSED_TOKENS)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of an engine once it runs."""

    config: EngineConfig
    model_config: ModelConfig
    max_len: int


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What an engine has counted so far."""

    engine_id: str  # Serve's, of the replica
    stats: CoreStats


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """An engine as the ingress knows it."""

    number: int
    engine_id: str
    stats: CoreStats
    error: NanovllmError | None = None
    num_restarts: int = 0  # Serve starts another engine, with another number
