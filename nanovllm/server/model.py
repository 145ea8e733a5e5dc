"""What a server asks of the model that it serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from nanovllm.config import EngineConfig
from nanovllm.engine.front import Front
from nanovllm.errors import NanovllmError
from nanovllm.outputs import EmbeddingOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serving.core_records import CoreStats
from nanovllm.serving.state_records import EngineNews


class Model(Protocol):
    """An AsyncLLM, or what stands for several of them."""

    config: EngineConfig
    front: Front
    max_len: int
    stats: CoreStats
    error: NanovllmError | None  # why it cannot answer now

    @property
    def num_requests(self) -> int:
        """Those that are under way."""

    @property
    def num_restarts(self) -> int:
        """Engines that took the place of others."""

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = True,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield an answer as it comes."""

    async def embed(self, prompt: Any, *, normalize: bool = True) -> EmbeddingOutput:
        """Return the embedding of a prompt."""

    def watch(self) -> AsyncGenerator[EngineNews, None]:
        """Yield an engine's state, then what changes."""
