"""Check that a model fits into memory, before anything large is downloaded or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nanovllm.checkpoint.find import stores_quantized
from nanovllm.checkpoint.quantization import choose_quantization
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import ConfigError
from nanovllm.layers.build import BuildContext
from nanovllm.layers.shards import check_splits
from nanovllm.models.registry import build_model, check_options, read_config_for
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.worker.device_interface import Device
from nanovllm.worker.host_memory import GIB
from nanovllm.worker.input_batch import slot_fields
from nanovllm.worker.kv_cache import kv_cache_spec
from nanovllm.worker.loader import named_layers
from nanovllm.worker.quantized_layouts import choose_layouts
from nanovllm.worker.state_cache import state_spec

HOST_BYTES = 200  # estimated bytes of the scheduler's state per block or slot
REMEDIES = {
    "weights": "use a smaller model, a 16-bit dtype or, on GPUs, a larger tensor_parallel_size",
    "tables": "lower max_num_seqs or max_model_len",
    "cache": "lower num_kvcache_blocks or kvcache_block_size",
    "step": "lower max_num_batched_tokens or max_num_seqs",
}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Minimum memory of a rank, in bytes."""

    weights: int
    tables: int  # InputBatch and RoPE tables
    cache: int
    step: int  # activations and logits of the largest step


def check_model(
    config: EngineConfig, device: Device | None, checkpoint_config: Mapping[str, Any]
) -> None:
    """Raise an error for a model that is not supported, cannot be sharded or does not fit."""
    model = read_config_for(checkpoint_config, config.model_impl)
    check_options(config, model)
    if model.recurrent is not None and config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config is not supported for {model.architecture}: a recurrent "
            "state cannot be rolled back after a rejected draft token; leave it out",
            param="speculative_config",
        )
    if config.quantization is not None:
        choose_quantization(config.quantization, checkpoint_config.get("quantization_config"))
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


def check_memory(
    config: EngineConfig, model: ModelConfig, device: Device, build: BuildContext
) -> None:
    needs = estimate_memory(config, model, build)
    if device.has_room_for_copy(needs.weights):  # weights are then kept in two layouts
        needs = replace(needs, weights=2 * needs.weights)
    memory, sizes = device.memory(), asdict(needs)
    total, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
    if total > memory.free:
        parts = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in sizes.items())
        each = f" for each of {build.group.size} ranks" if build.group.size > 1 else ""
        raise ConfigError(
            f"{config.model} in {str(build.dtype).removeprefix('torch.')} does not fit: it needs "
            f"{total / GIB:,.2f} GiB of memory ({parts}), and {memory.free / GIB:,.2f} GiB of "
            f"{memory.total / GIB:,.2f} are free{each}; {REMEDIES[largest]}"
        )


def estimate_memory(
    config: EngineConfig, model: ModelConfig, build: BuildContext
) -> MemoryEstimate:
    """Return the memory that a model needs with these options, without allocating any of it."""
    shapes = build_model(model, 1, replace(build, device=torch.device("meta")))
    if build.layouts is not None:  # `expected_tensors` creates the quantized parameters
        for path, layer in named_layers(shapes):
            layer.expected_tensors(path)
    max_len = min(config.max_model_len, model.max_position_embeddings)
    num_ropes = len({layer.rope for layer in model.layers})
    columns = slot_fields(max_len, config.kvcache_block_size).values()
    slot_bytes = 4 * sum(column.num_words for column in columns) + HOST_BYTES
    spec = kv_cache_spec(config, model, build.dtype, build.group)
    state_bytes = 0
    if model.recurrent is not None:  # three states: a sequence's, the padding's and the initial one
        state_bytes = 3 * state_spec(model.recurrent, build.dtype, build.group).num_bytes
    num_tokens = min(config.max_num_batched_tokens, config.max_num_rows * max_len)
    logits = min(config.max_num_rows, num_tokens) * model.vocab_size  # float32
    activations = num_tokens * _elements_per_token(model, build.group.size)
    return MemoryEstimate(
        weights=sum(parameter.nbytes for parameter in shapes.parameters()),
        tables=config.max_num_rows * slot_bytes + num_ropes * max_len * model.head_dim * 4,
        cache=max(config.num_kvcache_blocks, 1) * (spec.block_bytes + HOST_BYTES) + state_bytes,
        step=activations * build.dtype.itemsize + 4 * logits,
    )


def _elements_per_token(model: ModelConfig, num_ranks: int) -> int:
    """Count the elements per token that coexist in memory: residual, x, gate, up and gate * up."""
    size = model.intermediate_size
    if (experts := model.experts) is not None:
        size = experts.top_k * experts.size + experts.shared_size
    return 2 * model.hidden_size + 3 * size // num_ranks
