"""Client for the engines of a Ray Serve deployment; the server uses it in place of an AsyncLLM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from nanovllm.assembly import ResolvedModel, create_input_processor
from nanovllm.async_llm import GUESSED_TOKENS
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.images import NoImages
from nanovllm.engine.step import Pooling
from nanovllm.errors import EngineError, NanovllmError
from nanovllm.outputs import EmbeddingOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.core_messages import CoreStats

if TYPE_CHECKING:
    from nanovllm.serve.live.engine_state import EngineState

REFRESH_SECONDS = 2.0  # time between refreshes of the counters of all engines
WAIT_SECONDS = 10.0  # timeout of a refresh
NO_ENGINE = EngineError("no engine is running; Ray Serve will start another one")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A call to an engine, which the router chooses by `engine_id` if set, else by the prompt."""

    token_ids: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str | None = None
    is_streaming: bool = False
    request_id: str | None = None
    engine_id: str | None = None  # if set, only this engine may handle the call

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens plus the estimated number of output tokens."""
        return len(self.token_ids) + self.params.n * min(self.params.max_new_tokens, GUESSED_TOKENS)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The configuration of a running engine."""

    config: EngineConfig
    model_config: ModelConfig
    max_len: int


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """The counters of an engine."""

    engine_id: str  # Serve's id of the replica
    stats: CoreStats


@dataclass(slots=True)
class RemoteEngine:
    """The state of an engine, as the ingress last received it."""

    number: int
    engine_id: str
    stats: CoreStats
    error: NanovllmError | None = None
    num_restarts: int = 0  # always 0: a replacement by Serve gets a new number


class RemoteLLM:
    """Sends each prompt to an engine; `follow` refreshes the counters and health of all engines."""

    def __init__(self, engines: DeploymentHandle, found: ResolvedModel, max_len: int) -> None:
        self._engines = engines
        self.config, self.max_len = found.config, max_len
        self.input_processor = create_input_processor(found, is_remote=True)
        self.input_processor.image_reader = NoImages("Ray deployments read text only")
        self.replicas: list[RemoteEngine] = []
        self._numbers: dict[str, int] = {}  # numbers of all engines ever seen, keyed by engine_id
        self.num_requests = 0

    @property
    def error(self) -> NanovllmError | None:
        errors = [engine.error for engine in self.replicas]
        return None if None in errors else NO_ENGINE

    def generate(
        self,
        prompt: list[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = True,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield the pieces of the completions; closing the iterator early aborts the request."""
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._call("generate", Call(prompt, params, cache_salt, is_streaming, request_id))

    async def embed(
        self, prompt: list[int], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> EmbeddingOutput:
        call = Call(prompt, SamplingParams(max_tokens=1))
        async with contextlib.aclosing(self._call("embed", call, pooling, normalize)) as outputs:
            return await anext(outputs)

    async def watch(self, engine: int = 0) -> AsyncGenerator[EngineState, None]:
        """Yield a snapshot of the engine with the number `engine` whenever it changes."""
        found = [each.engine_id for each in self.replicas if each.number == engine]
        if not found:
            raise EngineError(f"engine {engine} is no longer running")
        call = Call(engine_id=found[0])
        async with contextlib.aclosing(self._items("watch", call)) as states:
            async for state in states:
                yield state

    async def follow(self) -> None:
        """Refresh the counters of all engines periodically."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.refresh()
            except Exception:  # keep the loop alive, or counters and health would go stale
                logger.exception("cannot refresh the counters of the engines")

    async def refresh(self) -> None:
        """Fetch the counters of all engines and drop those that fail; a timeout drops none."""
        found: list[EngineCounts | Exception] = []
        try:
            response = self._engines.broadcast("counts")
            found = await response.results_async(timeout_s=WAIT_SECONDS, return_exceptions=True)
        except TimeoutError:  # an engine is slow: keep the previous counters
            return
        except (RayError, RayServeException):  # no engine is running
            pass
        counts = {each.engine_id: each.stats for each in found if isinstance(each, EngineCounts)}
        for engine_id in counts:
            self._numbers.setdefault(engine_id, len(self._numbers))
        numbered = sorted((self._numbers[engine_id], engine_id) for engine_id in counts)
        lost = [replace(engine, error=NO_ENGINE) for engine in self.replicas]
        self.replicas = [RemoteEngine(*each, counts[each[1]]) for each in numbered] or lost

    async def _call(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Yield a remote method's items; retry once if the engine dies before the first one."""
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
        # Use an empty context: Serve treats all calls in the context of one HTTP request as the
        # same request, but each prompt of a request is a call of its own.
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
    """The process of an engine died; another engine may handle the request."""
