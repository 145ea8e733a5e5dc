"""What crosses between the ingress and the engines of an application of Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Call:
    """A prompt for an engine; the router sees it too."""

    token_ids: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str | None = None
    is_streaming: bool = False

    @property
    def num_tokens(self) -> int:
        """Those of the prompt, and those that the answers may have."""
        return len(self.token_ids) + self.params.n * self.params.max_tokens


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of an engine once it runs."""

    config: EngineConfig
    model_config: ModelConfig
    max_len: int
