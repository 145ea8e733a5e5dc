"""What a server asks of the model that it serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from nanovllm.config import EngineConfig
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.errors import NanovllmError
from nanovllm.outputs import EmbeddingOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.core_records import CoreStats, EngineState
from nanovllm.serve.replica import Replica


class OneEngine(Protocol):
    """One of the engines that answer together."""

    number: int  # it alone has this one, though there may be fewer engines
    stats: CoreStats
    error: NanovllmError | None  # why it cannot answer now
    num_restarts: int  # how often another one took its place


class Model(Protocol):
    """An AsyncLLM, or what stands for several of them."""

    config: EngineConfig
    input_processor: InputProcessor

    @property
    def replicas(self) -> Sequence[OneEngine]:
        """All engines."""

    @property
    def max_len(self) -> int:
        """Where sequences end."""

    @property
    def error(self) -> NanovllmError | None:
        """Why no engine can answer now."""

    @property
    def num_requests(self) -> int:
        """Those that are under way."""

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

    def watch(self, engine: int = 0) -> AsyncGenerator[EngineState, None]:
        """Yield the state of the replica with that number, then what changes."""


class OwnedModel(Model, Protocol):
    """A model whose engines the server starts and closes: an AsyncLLM."""

    replicas: list[Replica]

    def close(self, reason: NanovllmError | None = None) -> None:
        """End the engines; requests in progress fail with the reason."""
