"""What config.json may say: the type and the range of every value that is read from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.config import ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    is_whole: bool = True

    def accepts(self, value: object) -> bool:
        kinds = int if self.is_whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high  # type: ignore[operator]

    def __str__(self) -> str:
        if self.is_whole:
            return f"a whole number from {self.low:,} to {self.high:,}"
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A value of a JSON type; of a list, each item."""

    name: str
    type: type
    item: Number | Kind | None = None

    def accepts(self, value: object) -> bool:
        items = value if isinstance(value, list | tuple) else ()
        is_kind = isinstance(value, (list, tuple) if self.type is list else self.type)
        return is_kind and (self.item is None or all(map(self.item.accepts, items)))

    def __str__(self) -> str:
        return self.name


TEXT, FLAG, OBJECT = Kind("a string", str), Kind("true or false", bool), Kind("an object", dict)
HEADS, EXPERTS = Number(1, 1 << 14), Number(0, 1 << 12)  # 0 experts: a model without
WIDTH, INDEX, COUNT = Number(1, 1 << 22), Number(0, INT32_MAX), Number(1, INT32_MAX)
BASE = Number(1.001, 1e18, is_whole=False)  # has a positive logarithm
SCALE = Number(1e-6, 1e6, is_whole=False)
FIELDS: dict[str, Number | Kind] = {
    "vocab_size": Number(1, 1 << 24),
    "hidden_size": Number(1, 1 << 20),
    "intermediate_size": WIDTH,
    "num_hidden_layers": Number(1, 1 << 10),
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEADS,
    "rms_norm_eps": Number(0, 1, is_whole=False),
    "max_position_embeddings": COUNT,
    "sliding_window": INDEX,  # 0: none
    "sliding_window_pattern": COUNT,
    "max_window_layers": INDEX,
    "layer_types": Kind("a list of strings", list, TEXT),
    "query_pre_attn_scalar": Number(1e-6, 1e9, is_whole=False),
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "moe_intermediate_size": Number(0, 1 << 22),
    "decoder_sparse_step": COUNT,
    "mlp_only_layers": Kind("a list of whole numbers", list, INDEX),
    "hidden_act": TEXT,
    "hidden_activation": TEXT,
    "dtype": TEXT,
    "torch_dtype": TEXT,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), FLAG),
    **dict.fromkeys(("use_sliding_window", "norm_topk_prob", "truncate", "is_causal"), FLAG),
    # The rotation, at the top or in one of these objects
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT),
    **dict.fromkeys(("full_attention", "sliding_attention"), OBJECT),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), BASE),
    "rope_type": TEXT,
    "type": TEXT,
    "factor": SCALE,
    "factors": Kind("a list of positive numbers", list, SCALE),
    "partial_rotary_factor": Number(0, 1, is_whole=False),
    "original_max_position_embeddings": Number(1, INT32_MAX, is_whole=False),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), SCALE),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), Number(0, 1e6, False)),
}


def check_fields(config: Mapping[str, Any], where: str = "config.json") -> None:
    """Refuse the first value that could not be meant; null stands for a field left out."""
    for name, value in config.items():
        expected = FIELDS.get(name)
        if expected is None or value is None:
            continue
        if not expected.accepts(value):
            raise CheckpointError(f"{where}: {name} must be {expected}, got {value!r:.80}")
        if expected is OBJECT:
            check_fields(value, f"{where}, {name}")


def check_model(model: ModelConfig) -> None:
    """Refuse sizes that do not go together."""
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={heads} is no multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    if dim % 2:
        raise CheckpointError(f"config.json: a head of {dim} dimensions has no pairs to rotate")
    for rope in {layer.rope for layer in model.layers}:
        if problem := _rope_problem(rope, dim):
            raise CheckpointError(f"config.json: {rope.kind} rotation {problem}")


def _rope_problem(rope: RopeConfig, head_dim: int) -> str | None:
    num_pairs = head_dim // 2
    if rope.kind == "factors" and len(rope.factors) != num_pairs:
        return f"has {len(rope.factors)} factors for {num_pairs} pairs of dimensions"
    if rope.kind == "dynamic" and num_pairs == 1:
        return "needs heads of more than 2 dimensions"
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        return (
            f"has low_freq_factor={rope.low_freq_factor}, which must be below "
            f"high_freq_factor={rope.high_freq_factor}"
        )
    return None
