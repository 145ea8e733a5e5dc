"""Interfaces of the model behind an HTTP server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.config import EngineConfig
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.step import Pooling
from nanovllm.errors import NanovllmError
from nanovllm.outputs import EmbeddingOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.core_messages import CoreStats
from nanovllm.serve.replica import Replica

if TYPE_CHECKING:
    from nanovllm.serve.live.engine_state import EngineState


class ReplicaInfo(Protocol):
    """Status of one replica of the model."""

    number: int  # unique, but not necessarily consecutive
    stats: CoreStats
    error: NanovllmError | None  # set while the engine is unavailable
    num_restarts: int


class Model(Protocol):
    """A served model: an AsyncLLM, or a RemoteLLM on a Ray cluster."""

    config: EngineConfig
    input_processor: InputProcessor

    @property
    def replicas(self) -> Sequence[ReplicaInfo]:
        """All replicas of the model."""

    @property
    def max_len(self) -> int:
        """Maximum sequence length in tokens."""

    @property
    def error(self) -> NanovllmError | None:
        """The error if no engine is available, else None."""

    @property
    def num_requests(self) -> int:
        """Number of requests in progress."""

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = True,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield pieces of the completions as they are generated."""

    async def embed(
        self, prompt: Any, *, pooling: Pooling | None = None, normalize: bool = True
    ) -> EmbeddingOutput:
        """Return the embedding of a prompt."""

    def watch(self, engine: int = 0) -> AsyncGenerator[EngineState, None]:
        """Yield state snapshots of the replica with the number `engine`."""


class OwnedModel(Model, Protocol):
    """A model whose engines the server starts and closes: an AsyncLLM."""

    replicas: list[Replica]

    def close(self, reason: NanovllmError | None = None) -> None:
        """Stop the engines; requests in progress fail with `reason`."""
