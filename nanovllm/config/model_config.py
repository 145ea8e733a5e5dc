"""ModelConfig: the sizes and constants of a model, read from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

ConfigJson: TypeAlias = Mapping[str, Any]  # the content of a config.json, or of one of its objects


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base, and how the frequencies are scaled for longer contexts."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()  # for kind "factors": a divisor per frequency, as in GGUF
    # For kind "yarn": frequencies with more than `beta_fast` rotations over the trained context are
    # kept, those with fewer than `beta_slow` are divided by `factor`, the rest is interpolated.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True  # round the boundaries of the interpolation to whole indices
    attention_factor: float = 1.0  # multiplies cosines and sines
    # q at position p is multiplied by 1 + q_scaling * log(1 + p // original_max_position).
    q_scaling: float = 0.0
    rotary_dim: int | None = None  # number of rotated leading dimensions of a head; None: all
    is_interleaved: bool = False  # True: pairs are adjacent; False: rotary_dim / 2 apart


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention settings that may differ between layers."""

    rope: RopeConfig
    window: int | None = None  # sliding window in tokens; None: full attention
    cache_layer: int | None = None  # index of the layer whose cache it uses; None: its own
    kv_shape: tuple[int, int] | None = None  # number and dimension of KV heads; None: the model's


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts that replaces the MLP."""

    num_experts: int
    top_k: int
    size: int  # intermediate size of one expert
    is_normalized: bool  # whether the weights of a token's experts are normalized to sum to one
    dense_layers: frozenset[int] = frozenset()  # indices of layers with a plain MLP
    shared_size: int = 0  # size of the shared expert, which every token runs through; 0: none


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Gated DeltaNet layers, which have a recurrent state in place of keys and values."""

    layers: frozenset[int]  # indices of these layers
    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int  # per head
    value_dim: int  # per head
    conv_size: int  # kernel size of the causal convolution, in tokens
    # Whether value head i uses key head i % num_key_heads, as in GGUF files; otherwise, adjacent
    # value heads share a key head.
    is_tiled: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a model with decoder layers, read from its config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layers: tuple[LayerAttention, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    activation: Literal["silu", "gelu_tanh"]
    attention_scale: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    embedding_scale: float = 1.0
    embedding_divisor: float = 1.0  # unlike the scale, it is not rounded to the model's dtype
    attention_softcap: float | None = None  # bound of attention scores: cap * tanh(score / cap)
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    norm_offset: float = 0.0  # added to norm weights; 1 if checkpoints store the weights minus 1
    has_output_gate: bool = False  # whether q_proj also computes a gate for attention's output
    experts: ExpertsConfig | None = None
    recurrent: RecurrentConfig | None = None
    is_causal: bool = True  # False: tokens attend to later ones too; only for embedding models
    # config.json if transformers' model code runs the model; None if nanovllm's own does.
    transformers_config: ConfigJson | None = None

    @property
    def num_weights_per_token(self) -> int:
        """Approximate number of weights that each token is multiplied with."""
        hidden, size, experts = self.hidden_size, self.intermediate_size, self.experts
        if experts is not None:
            size = experts.top_k * experts.size + experts.shared_size
        return len(self.layers) * hidden * (4 * hidden + 3 * size) + self.vocab_size * hidden
