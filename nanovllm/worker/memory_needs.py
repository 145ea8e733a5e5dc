"""What a model needs of a rank's memory: estimated before it is loaded, then measured.

This determines whether the model fits, and how many blocks the KV cache has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.executor import Windows
from nanovllm.errors import ConfigError
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import build_model
from nanovllm.worker.device_interface import Device
from nanovllm.worker.host_memory import GIB
from nanovllm.worker.input_batch import slot_fields
from nanovllm.worker.kv_cache import kv_cache_spec, wanted_blocks
from nanovllm.worker.loader import named_layers
from nanovllm.worker.state_cache import state_spec

HOST_BYTES = 200  # estimated bytes of the scheduler's state per block or slot
REMEDIES = {
    "weights": "use a smaller model, a 16-bit dtype or, on GPUs, a larger tensor_parallel_size",
    "tables": "lower max_num_seqs or max_model_len",
    "cache": "lower num_kvcache_blocks or kvcache_block_size",
    "step": "lower max_num_batched_tokens or max_num_seqs",
}


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a model needs of a rank's memory, in bytes.

    `check_memory` estimates all parts before loading. Once the weights are loaded, `Device.prepare`
    measures a step, from which it computes `graphs`.
    """

    weights: int
    tables: int  # InputBatch and RoPE tables
    states: int  # the fewest recurrent states with which a model runs
    block: int  # one block of the KV cache
    step: int  # activations and logits of the largest step
    graphs: int
    windows: Windows = (None,)  # of the groups of layers in the KV cache
    id_factors: tuple[int, ...] = (1,)  # for each group, what multiplies block ids

    def including(self, part: MemoryNeeds) -> MemoryNeeds:
        """Add what a WorkerPart needs besides its weights, which are already loaded.

        Its steps reuse the memory of the model's, and are assumed to need less.
        """
        return replace(
            self,
            block=self.block + part.block,
            graphs=self.graphs + part.graphs,
            # A part may add a group.
            windows=max(self.windows, part.windows, key=len),
            id_factors=max(self.id_factors, part.id_factors, key=len),
        )


def check_memory(
    config: EngineConfig,
    model: ModelConfig,
    device: Device,
    build: BuildContext,
    target: ModelConfig | None = None,
) -> MemoryNeeds:
    """Estimate what a model needs; raise ConfigError if it does not fit."""
    needs = estimate_memory(config, model, build, target)
    if device.has_room_for_copy(needs.weights):  # weights are then kept in two layouts
        needs = replace(needs, weights=2 * needs.weights)
    num_blocks = max(config.num_kvcache_blocks, 1) * len(needs.windows)
    sizes = {
        "weights": needs.weights,
        "tables": needs.tables,
        "cache": needs.states + num_blocks * (needs.block + HOST_BYTES),
        "step": needs.step,
    }
    memory = device.memory()
    total, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
    if total > memory.free:
        parts = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in sizes.items())
        each = f" for each of {build.group.size} ranks" if build.group.size > 1 else ""
        raise ConfigError(
            f"{config.model} in {str(build.dtype).removeprefix('torch.')} does not fit: it needs "
            f"{total / GIB:,.2f} GiB of memory ({parts}), and {memory.free / GIB:,.2f} GiB of "
            f"{memory.total / GIB:,.2f} are free{each}; {REMEDIES[largest]}"
        )
    # Graphs are left out of the check, which must accept what can run: their estimate is generous.
    return replace(needs, graphs=device.estimate_graphs(needs.step))


def estimate_memory(
    config: EngineConfig,
    model: ModelConfig,
    build: BuildContext,
    target: ModelConfig | None = None,
) -> MemoryNeeds:
    """Return the least memory that a model needs, except for graphs, without allocating any."""
    shapes = build_model(model, 1, replace(build, device=torch.device("meta")))
    if build.layouts is not None:  # `expected_tensors` creates the quantized parameters
        for path, layer in named_layers(shapes):
            layer.expected_tensors(path)
    max_len = min(config.max_model_len, model.max_position_embeddings)
    num_ropes = len({layer.rope for layer in model.layers})
    spec = kv_cache_spec(config, model, build.dtype, build.group, target)
    num_groups = len(spec.groups.windows)
    columns = slot_fields(max_len, config.kvcache_block_size, num_groups).values()
    slot_bytes = 4 * sum(column.num_words for column in columns) + HOST_BYTES
    state_bytes = 0
    if model.recurrent is not None:  # three states: a sequence's, the padding's and the initial one
        state_bytes = 3 * state_spec(model.recurrent, build.dtype, build.group).num_bytes
    num_tokens = min(config.max_num_batched_tokens, config.max_num_rows * max_len)
    logits = min(config.max_num_rows, num_tokens) * model.vocab_size  # float32
    activations = num_tokens * _elements_per_token(model, build.group.size)
    return MemoryNeeds(
        weights=sum(parameter.nbytes for parameter in shapes.parameters()),
        tables=config.max_num_rows * slot_bytes + num_ropes * max_len * model.head_dim * 4,
        states=state_bytes,
        block=spec.block_bytes,
        step=activations * build.dtype.itemsize + 4 * logits,
        graphs=0,
        windows=spec.groups.windows,
        id_factors=spec.groups.id_factors,
    )


def _elements_per_token(model: ModelConfig, num_ranks: int) -> int:
    """Count the elements per token that coexist in memory: residual, x, gate, up and gate * up."""
    size = model.intermediate_size
    if (experts := model.experts) is not None:
        size = experts.top_k * experts.size + experts.shared_size
    return 2 * model.hidden_size + 3 * size // num_ranks


def choose_num_blocks(config: EngineConfig, needs: MemoryNeeds, device: Device) -> int:
    """Return the number of blocks of all groups: as configured, or as many as fit in memory.

    The default is at most the number that `max_num_seqs` sequences of full length need.
    """
    num_blocks = wanted_blocks(config, needs.windows)
    if config.num_kvcache_blocks != -1:
        device.check_cache_bytes(needs, num_blocks * needs.block)
        return num_blocks
    num_blocks = device.cache_bytes(needs, num_blocks * needs.block) // needs.block
    num_groups = len(needs.windows)
    if num_blocks < num_groups:
        raise ConfigError(
            f"no room for a KV cache: one block of {config.kvcache_block_size} tokens takes "
            f"{num_groups * needs.block:,} bytes; free memory, or use a smaller kvcache_block_size"
        )
    return num_blocks
