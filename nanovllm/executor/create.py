"""Choose where the workers of an engine live: one in this process, several in their own, or on a
Ray cluster.
"""

from __future__ import annotations

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.devices.choose import create_device
from nanovllm.executor.base import Executor
from nanovllm.executor.local import LocalExecutor
from nanovllm.executor.multiproc import MultiprocExecutor
from nanovllm.worker.worker import Worker


def create_executor(
    config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
) -> Executor:
    if config.distributed_executor_backend == "ray":
        from nanovllm.executor.ray_workers import RayWorkers

        return MultiprocExecutor(config, model_config, checkpoint, workers=RayWorkers())
    if config.tensor_parallel_size > 1:
        return MultiprocExecutor(config, model_config, checkpoint)
    return LocalExecutor(Worker(config, model_config, checkpoint, create_device(config)))
