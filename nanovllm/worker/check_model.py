"""Check that a model can run here, before anything large is downloaded or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.checkpoint.find import stores_quantized
from nanovllm.checkpoint.quantization import choose_quantization
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import fallback, read_config_for
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.worker.check_splits import check_splits
from nanovllm.worker.device_interface import Device
from nanovllm.worker.memory_needs import check_memory
from nanovllm.worker.quantized_layouts import choose_layouts


def check_model(
    config: EngineConfig, device: Device | None, checkpoint_config: Mapping[str, Any]
) -> None:
    """Raise an error for a model that is not supported, cannot be sharded or does not fit."""
    model = read_config_for(checkpoint_config, config.model_impl)
    if model.transformers_config is not None:
        fallback().check_options(config, model)
    if model.recurrent is not None and config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config is not supported for {model.architecture}: a recurrent "
            "state cannot be rolled back after a rejected draft token; leave it out",
            param="speculative_config",
        )
    if config.quantization is not None:
        choose_quantization(config.quantization, checkpoint_config.get("quantization_config"))
    if config.tensor_parallel_size > 1:
        check_splits(model, config.tensor_parallel_size)
    if device is None:
        return  # each rank will check its own device
    if config.kv_cache_dtype != "auto":
        device.check_fp8(model.head_dim)
    is_quantized = stores_quantized(checkpoint_config)
    dtype = device.choose_dtype(config.dtype, model.dtype, is_quantized)
    ops = TorchOps()
    attention = device.attention(dtype, ops)
    layouts = None
    if config.quantization is not None or is_quantized:
        layouts = choose_layouts(config, checkpoint_config, device, dtype)
    build = BuildContext(device.torch_device, dtype, attention, ops, device.group, layouts)
    check_memory(config, model, device, build)
