"""Choose what runs a model, once: the device, its operations, its attention, its steps."""

from __future__ import annotations

from nanovllm.attention import create_attention
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.distributed.group import ALONE, TPGroup
from nanovllm.platforms import create_platform
from nanovllm.platforms.cpu import CpuPlatform
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.backend import Backend, choose_dtype


def create_backend(config: EngineConfig, model: ModelConfig, group: TPGroup = ALONE) -> Backend:
    num_ranks = group.size * config.data_parallel_size
    platform = create_platform(config.device, config.gpu_memory_utilization, num_ranks)
    if config.kv_cache_dtype != "auto":
        platform.check_fp8(model.head_dim)
    dtype = choose_dtype(config.dtype, model.dtype, platform)
    block_size, name = config.kvcache_block_size, config.attention_backend
    if isinstance(platform, CudaPlatform):
        from nanovllm.backends.cuda.backend import CudaBackend
        from nanovllm.kernels.cuda.ops import TritonOps  # needs triton

        ops = TritonOps()
        attention = create_attention(platform, ops, block_size, name, dtype)
        return CudaBackend(platform, dtype, group, ops, attention, config, model)
    from nanovllm.backends.cpu.backend import create_cpu_backend

    assert isinstance(platform, CpuPlatform)
    return create_cpu_backend(platform, dtype, group, config)
