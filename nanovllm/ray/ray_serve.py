"""`build_app`: a Ray Serve application with the routes and options of `nanovllm serve`.

The ingress is the HTTP server without an engine: it parses requests, tokenizes prompts and sends
each prompt to one of the engines, which Serve starts, monitors and scales.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from nanovllm.assembly import ResolvedModel
from nanovllm.async_llm import AsyncLLM
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.cli import parse
from nanovllm.cli.serve import engine_config, server_options
from nanovllm.config import EngineConfig
from nanovllm.engine.step import Pooling
from nanovllm.errors import ConfigError
from nanovllm.outputs import EmbeddingOutput, StreamPiece
from nanovllm.parallel.ray_workers import connect
from nanovllm.ray.remote_llm import Call, EngineCounts, EngineInfo, RemoteLLM
from nanovllm.serve.app import make_app
from nanovllm.serve.service import Service

if TYPE_CHECKING:
    from nanovllm.serve.live.engine_state import EngineState

HEALTH_SECONDS = 2.0  # time between checks; Serve replaces an engine that fails three in a row
DRAIN_SECONDS = 60.0  # time for an engine to finish its requests when it is scaled down
MAX_REQUESTS = 2**16  # high, so that the ingress itself rejects requests when its queue is full
# By default, Serve passes every token between threads through unbounded queues. A single event loop
# needs no such queues, and the engine merges the tokens that a slow reader has not fetched.
ONE_LOOP = {
    "env_vars": {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    }
}
SERVE_OPTIONS = (
    "host", "port", "root_path", "ssl_certfile", "ssl_keyfile", "shutdown_timeout",
    "restart_engine", "in_process", "data_parallel_size", "config", "verbose", "threads",
    "log_level", "allow_pause",
)  # fmt: skip


def build_app(options: str | Mapping[str, Any]) -> serve.Application:
    """Build an application from a model name, or from a mapping of options that has `model`.

    >>> serve.run(build_app({"model": "Qwen/Qwen3-0.6B", "min_replicas": 1, "max_replicas": 4}))

    The options are those of a `nanovllm serve --config` file, Serve's autoscaling options, and
    `num_cpus` per engine. They are a single argument, as Serve requires of application builders.
    """
    named = {"model": options} if isinstance(options, str) else dict(options)
    num_cpus = float(named.pop("num_cpus", 1))
    scaling = {name: named.pop(name) for name in AutoscalingConfig.model_fields if name in named}
    config = engine_config(_parse(named))
    engine = serve.deployment(Engine).options(
        autoscaling_config=_autoscaling(scaling, config),
        ray_actor_options={
            "num_cpus": num_cpus,
            "num_gpus": _num_gpus(config),
            "runtime_env": ONE_LOOP,
        },
        # Twice as many requests as can run at once keep an engine busy. Others wait in the
        # ingress, so that a new engine can take them.
        max_ongoing_requests=2 * config.max_num_seqs,
        request_router_config=_routing(config),
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=5 * HEALTH_SECONDS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        logging_config={"enable_access_log": False},  # the ingress logs requests
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        max_ongoing_requests=MAX_REQUESTS, ray_actor_options={"runtime_env": ONE_LOOP}
    )
    return ingress.bind(engine.bind(config), named)


class Engine:
    """Deployment of an AsyncLLM, which is called from other processes."""

    async def __init__(self, config: EngineConfig) -> None:  # type: ignore[misc]
        """Load the model in a thread, so that Serve can stop the engine while it loads."""
        # Requests through Ray have no images.
        options = asdict(config) | {"limit_mm_per_prompt": {"image": 0}}
        self._llm = await asyncio.to_thread(AsyncLLM, **options)

    async def info(self) -> EngineInfo:
        return EngineInfo(self._llm.config, self._llm.model_config, self._llm.max_len)

    async def generate(self, call: Call) -> AsyncGenerator[StreamPiece, None]:
        self._end_if_failed()
        pieces = self._llm.generate(
            call.token_ids,
            call.params,
            request_id=call.request_id,
            cache_salt=call.cache_salt,
            is_streaming=call.is_streaming,
        )
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def embed(
        self, call: Call, pooling: Pooling | None, normalize: bool
    ) -> AsyncGenerator[EmbeddingOutput, None]:
        self._end_if_failed()
        yield await self._llm.embed(call.token_ids, pooling=pooling, normalize=normalize)

    async def watch(self, call: Call) -> AsyncGenerator[EngineState, None]:
        async with contextlib.aclosing(self._llm.watch()) as states:
            async for state in states:
                yield state

    async def counts(self) -> EngineCounts:
        await self.check_health()
        replica_id = serve.get_replica_context().replica_id
        return EngineCounts(replica_id.unique_id, self._llm.stats)

    async def check_health(self) -> None:
        """Raise the error of an engine core that crashed or hangs; called by Serve."""
        if self._llm.error is not None:
            raise self._llm.error

    def __del__(self) -> None:
        """Free the GPU memory for the next engine; Serve calls this before the process ends."""
        if hasattr(self, "_llm"):
            self._llm.close()

    def _end_if_failed(self) -> None:
        """Exit the process instead of failing requests until Serve notices.

        An engine that fails immediately has the least load and would attract every request.
        """
        if self._llm.error is not None:
            os._exit(1)


class Ingress:
    """Deployment of the HTTP application of `nanovllm serve`."""

    def __init__(self, engines: DeploymentHandle, options: dict[str, Any]) -> None:
        self._engines, self._args = engines, _parse(options)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Build the application as soon as an engine is up; called by Serve."""
        info: EngineInfo = await self._engines.info.remote()
        config = info.config
        # The engine's files may be on another node, so find them here as well.
        checkpoint = await asyncio.to_thread(
            find_checkpoint, config.model, revision=config.revision, need_weights=False
        )
        found = ResolvedModel(config, info.model_config, checkpoint)
        llm = await asyncio.to_thread(RemoteLLM, self._engines, found, info.max_len)
        await llm.refresh()
        self._following = asyncio.create_task(llm.follow())
        options = server_options(self._args, config.model, checkpoint.generation_config)
        return make_app(Service(llm, options))


def _parse(named: dict[str, Any]) -> Namespace:
    rejected = [name for name in named if name.replace("-", "_") in SERVE_OPTIONS]
    if rejected:
        raise ConfigError(f"{rejected[0]} is not supported here; Ray Serve starts the engines")
    booleans = {"true": True, "false": False}  # `serve run` passes strings
    options = {k: booleans.get(v, v) if isinstance(v, str) else v for k, v in named.items()}
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return parse(["serve"], options)
    except SystemExit:
        raise ConfigError(stderr.getvalue().strip().rsplit("\n", 1)[-1]) from None


def _autoscaling(scaling: dict[str, Any], config: EngineConfig) -> AutoscalingConfig:
    scaling.setdefault("max_replicas", max(int(scaling.get("min_replicas") or 1), 1))
    scaling.setdefault("target_ongoing_requests", max(config.max_num_seqs // 2, 1))
    return AutoscalingConfig(**scaling)


def _num_gpus(config: EngineConfig) -> int:
    if config.distributed_executor_backend == "ray":
        return 0  # the workers request the GPUs
    has_gpus = config.device != "cpu"
    if config.device == "auto":
        connect()  # `serve run` builds the application before it joins the cluster
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    return config.tensor_parallel_size if has_gpus else 0


def _routing(config: EngineConfig) -> RequestRouterConfig:
    if not config.enable_prefix_caching:
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class="nanovllm.ray.router.PrefixRequestRouter",
        request_router_kwargs={"block_size": config.kvcache_block_size},
    )
