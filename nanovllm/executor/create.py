"""Choose where the workers of an engine live: one in this process, several in their own, or on a
Ray cluster.
"""

from __future__ import annotations

from nanovllm.backends.create import create_backend
from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import ConfigError
from nanovllm.executor.base import Executor
from nanovllm.executor.local import LocalExecutor
from nanovllm.executor.multiproc import MultiprocExecutor
from nanovllm.executor.worker_processes import Workers
from nanovllm.worker.worker import Worker


def create_executor(
    config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
) -> Executor:
    kind, num_ranks = config.distributed_executor_backend, config.tensor_parallel_size
    if kind not in ("mp", "uni", "ray"):
        raise ConfigError(
            f"distributed_executor_backend must be 'mp', 'uni' or 'ray', got {kind!r}"
        )
    if kind == "uni" and num_ranks > 1:
        raise ConfigError(f"tensor_parallel_size={num_ranks} needs 'mp' or 'ray', not 'uni'")
    if kind == "ray":
        return MultiprocExecutor(config, model_config, checkpoint, workers=_ray_workers())
    if num_ranks > 1:
        return MultiprocExecutor(config, model_config, checkpoint)
    backend = create_backend(config, model_config)
    return LocalExecutor(Worker(config, model_config, checkpoint, backend))


def _ray_workers() -> Workers:
    try:
        from nanovllm.executor.ray_workers import RayWorkers
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"distributed_executor_backend='ray' needs Ray ({error}): pip install 'nanovllm[ray]'"
        ) from error
    return RayWorkers()
