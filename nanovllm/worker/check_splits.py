"""Check that a model can be sharded."""

from __future__ import annotations

from nanovllm.config import ModelConfig
from nanovllm.errors import ConfigError


def check_splits(model: ModelConfig, size: int) -> None:
    """Raise ConfigError if the number of ranks does not divide the model's sizes."""
    experts, recurrent = model.experts, model.recurrent
    dense = experts is None or experts.dense_layers
    sizes = {
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size if dense else 0,
        "the experts' intermediate size": 0 if experts is None else experts.size,
        "the shared expert's size": 0 if experts is None else experts.shared_size,
        "linear_num_key_heads": 0 if recurrent is None else recurrent.num_key_heads,
        # The number of ranks may also be a multiple of that of kv heads: ranks then share a head.
        "num_key_value_heads": model.num_kv_heads if size % model.num_kv_heads else 0,
    }
    if size > 1 and recurrent is not None and recurrent.is_tiled:
        raise ConfigError(
            f"tensor_parallel_size={size} is not supported for GGUF files of this architecture, "
            "which store value heads in a different order; use the safetensors checkpoint"
        )
    if problems := [f"{name}={number}" for name, number in sizes.items() if number % size]:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide this model's {', '.join(problems)}"
        )
