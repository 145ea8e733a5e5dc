"""An AsyncLLM without a model: it returns a given text in pieces of a few characters."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.input_processor import InputProcessor, Vocabulary
from nanovllm.errors import NanovllmError
from nanovllm.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.core_messages import ControlAction, CoreStats
from nanovllm.serve.live.engine_state import EngineState
from nanovllm.serve.live.subscribers import Subscribers
from tests.serve.byte_model import byte_tokenizer

STATS = CoreStats(num_blocks=64, num_free_blocks=64)
IDLE = EngineState(64, 16, 8, 512, [], [], bytes(64), [], [], STATS, 0)


@dataclass
class FakeLLM:
    text: str = "Hello!"
    failure: NanovllmError | None = None  # raised after the first piece of a stream
    is_silent: bool = False  # never generates anything
    reason: str = "stop"
    stop_reason: str | None = None
    seed: int = 0
    max_len: int = 1024
    number: int = 0  # replica number
    num_requests: int = 0
    num_restarts: int = 0
    error: NanovllmError | None = None
    stats: CoreStats = field(default_factory=CoreStats)
    config: EngineConfig = field(default_factory=lambda: EngineConfig("fake"))
    asked: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    request_ids: list[str | None] = field(default_factory=list)
    num_aborted: int = 0
    actions: list[ControlAction] = field(default_factory=list)
    pause: float = 0.0  # seconds between pieces
    idle: EngineState = IDLE  # snapshot sent to subscribers
    others: list[FakeLLM] = field(default_factory=list)  # the other replicas

    def __post_init__(self) -> None:
        for number, other in enumerate(self.others, 1):
            other.number = number
        self.subscribers = Subscribers(
            lambda is_on: self.subscribers.push(self.idle) if is_on else None
        )
        self.input_processor = InputProcessor(Vocabulary(byte_tokenizer(), frozenset()), 288, 0)

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = True,
    ) -> AsyncGenerator[StreamPiece, None]:
        self._raise_if_failed()
        self.asked.append((prompt, params))
        self.request_ids.append(request_id)
        self.num_requests += 1
        is_over = False
        try:
            while self.is_silent:
                await asyncio.sleep(0.01)
                self._raise_if_failed()
            for piece in self._cut() if is_streaming else ():
                ids = self.input_processor.encode(piece)
                logprobs = None if params.logprobs is None else self._logprobs(ids)
                yield StreamPiece(0, piece, ids, None, logprobs)
                await asyncio.sleep(self.pause)
                if self.failure is not None:
                    raise self.failure
                self._raise_if_failed()
            is_over = True
            yield StreamPiece(0, "", [], self._output(prompt))
        finally:
            self.num_requests -= 1
            self.num_aborted += not is_over

    async def embed(self, prompt: list[int], **options: Any) -> EmbeddingOutput:
        self.num_requests += 1
        try:
            while self.is_silent:
                await asyncio.sleep(0.01)
                self._raise_if_failed()
            return EmbeddingOutput([1.0], prompt)
        finally:
            self.num_requests -= 1

    @property
    def replicas(self) -> list[FakeLLM]:
        return [self, *self.others]

    async def watch(self, engine: int = 0) -> AsyncGenerator[EngineState, None]:
        replica = self.replicas[engine]
        if replica.error is not None:
            raise replica.error
        async with contextlib.aclosing(replica.subscribers.subscribe()) as states:
            async for state in states:
                yield state

    def end_snapshots(self, error: NanovllmError | None = None) -> None:
        self.subscribers.end(error)

    def control(self, action: ControlAction) -> None:
        self.actions.append(action)

    def close(self, reason: NanovllmError | None = None) -> None:
        self.error = reason

    def _raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error

    def _cut(self) -> list[str]:
        chance, pieces, rest = random.Random(self.seed), [], self.text
        while rest:
            size = chance.randint(1, 5)
            pieces.append(rest[:size])
            rest = rest[size:]
        return pieces

    def _logprobs(self, ids: list[int]) -> list[dict[int, Logprob]]:
        return [{i: Logprob(-0.5, 1, self.input_processor.tokenizer.decode([i]))} for i in ids]

    def _output(self, prompt: list[int]) -> RequestOutput:
        ids = self.input_processor.encode(self.text)
        best = CompletionOutput(0, self.text, ids, None, None, self.reason, self.stop_reason)
        own: dict[str, Any] = {"time_to_first_token": 0.1, "duration": 0.2, "outputs": [best]}
        return RequestOutput(0, None, prompt, self.text, ids, self.reason, 3, **own)
