"""The engines of a Ray Serve deployment, in the place of the AsyncLLM that a server has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from nanovllm.async_llm import GUESSED_TOKENS
from nanovllm.checkpoint.resolved_model import ResolvedModel
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import EngineError, NanovllmError
from nanovllm.llm import create_input_processor
from nanovllm.outputs import EmbeddingOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.core_records import CoreStats, EngineState

LOOK_SECONDS = 2.0  # between looks at all engines
WAIT_SECONDS = 10.0  # for their answers
NO_ENGINE = EngineError("no engine is running; Ray Serve starts another one")

logger = logging.getLogger(__name__)


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
    """Facts about a running engine."""

    config: EngineConfig
    model_config: ModelConfig
    max_len: int


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What an engine has counted so far."""

    engine_id: str  # Serve's, of the replica
    stats: CoreStats


@dataclass(slots=True)
class RemoteEngine:
    """An engine as the ingress knows it."""

    number: int
    engine_id: str
    stats: CoreStats
    error: NanovllmError | None = None
    num_restarts: int = 0  # Serve starts another engine, with another number


class RemoteLLM:
    """Sends each prompt to an engine; `follow` keeps the counts and the health of all of them."""

    def __init__(self, engines: DeploymentHandle, found: ResolvedModel, max_len: int) -> None:
        self._engines = engines
        self.config, self.max_len = found.config, max_len
        self.input_processor = create_input_processor(found, is_remote=True)
        self.replicas: list[RemoteEngine] = []
        self._numbers: dict[str, int] = {}  # by engine_id, of all that were ever seen
        self.num_requests = 0

    @property
    def error(self) -> NanovllmError | None:
        errors = [engine.error for engine in self.replicas]
        return None if None in errors else NO_ENGINE

    def generate(
        self,
        prompt: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = True,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield what an engine does; leaving the iterator early aborts the request there."""
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._answer("generate", Call(prompt, params, cache_salt, is_streaming))

    async def embed(self, prompt: list[int], *, normalize: bool = True) -> EmbeddingOutput:
        call = Call(prompt, SamplingParams(max_tokens=1))
        async with contextlib.aclosing(self._answer("embed", call, normalize)) as outputs:
            return await anext(outputs)

    async def watch(self, engine: int = 0) -> AsyncGenerator[EngineState, None]:
        """Yield snapshots of the engine with that number as it changes."""
        found = [each.engine_id for each in self.replicas if each.number == engine]
        if not found:
            raise EngineError(f"engine {engine} is no longer running")
        call = Call(engine_id=found[0])
        async with contextlib.aclosing(self._items("watch", call)) as states:
            async for state in states:
                yield state

    async def follow(self) -> None:
        """Look at all engines, again and again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.refresh()
            except Exception:  # or counts and health would stay as they are for good
                logger.exception("the engines could not be asked for their counts")

    async def refresh(self) -> None:
        """Ask all engines for their counts; those that do not work have none."""
        found: list[EngineCounts | Exception] = []
        try:
            response = self._engines.broadcast("counts")
            found = await response.results_async(timeout_s=WAIT_SECONDS, return_exceptions=True)
        except TimeoutError:  # one is slow: what was known stays
            return
        except (RayError, RayServeException):  # there is none
            pass
        counts = {each.engine_id: each.stats for each in found if isinstance(each, EngineCounts)}
        for engine_id in counts:
            self._numbers.setdefault(engine_id, len(self._numbers))
        numbered = sorted((self._numbers[engine_id], engine_id) for engine_id in counts)
        lost = [replace(engine, error=NO_ENGINE) for engine in self.replicas]
        self.replicas = [RemoteEngine(*each, counts[each[1]]) for each in numbered] or lost

    async def _answer(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Yield what a method yields for a prompt; a second engine tries what one never began."""
        self.num_requests += 1
        has_begun = False
        try:
            for is_last in (False, True):
                try:
                    async with contextlib.aclosing(self._items(method, *arguments)) as items:
                        async for item in items:
                            has_begun = True
                            yield item
                    return
                except EngineDied:
                    if has_begun or is_last:
                        raise
        finally:
            self.num_requests -= 1

    async def _items(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        handle = self._engines.options(method_name=method, stream=True)
        # Not in the context of the HTTP request: Serve takes all calls that are made in there for
        # one, but the prompts of a request are sent each by itself.
        response = Context().run(handle.remote, *arguments)
        is_over = False
        try:
            async for item in response:
                yield item
            is_over = True
        except ActorDiedError as error:
            raise EngineDied("the process of the engine died") from error
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, RayServeException) as error:
            raise EngineError(f"the engine cannot be reached: {error}") from error
        finally:
            if not is_over:
                response.cancel()


class EngineDied(EngineError):
    """With its process; another engine may answer."""
