"""What the user asked for (EngineConfig), what the checkpoint says (ModelConfig): no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.validation import check_types

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("triton", "sdpa", "flash_attn")
ROPE_KINDS = ("default", "linear", "llama3", "factors")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every option of `LLM(...)`; the first ten are nano-vLLM's."""

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 64
    num_kvcache_blocks: int = -1  # -1: as many as the memory allows
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    enable_prefix_caching: bool = True
    load_format: str = "auto"  # "dummy": random weights from the config alone
    skip_tokenizer_init: bool = False
    attention_backend: str = "auto"  # on CUDA "triton"; on a CPU what its kernels bring
    depth: int | None = None  # steps in flight beyond the one awaited; None: the platform's choice
    revision: str | None = None  # a branch, tag or commit of a hub model; None: its main branch

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require(
            "max_model_len", self.max_model_len >= 2, "at least 2: one prompt, one new token"
        )
        self._require("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]")
        is_multiple = self.kvcache_block_size >= 16 and self.kvcache_block_size % 16 == 0
        self._require("kvcache_block_size", is_multiple, "a multiple of 16")
        is_count = self.num_kvcache_blocks == -1 or self.num_kvcache_blocks >= 1
        self._require("num_kvcache_blocks", is_count, "at least 1, or -1 to size it from memory")
        self._require("dtype", self.dtype in ("auto", *DTYPES), f"'auto' or one of {DTYPES}")
        self._require("load_format", self.load_format in ("auto", "dummy"), "'auto' or 'dummy'")
        is_backend = self.attention_backend in ("auto", *ATTENTION_BACKENDS)
        self._require("attention_backend", is_backend, f"'auto' or one of {ATTENTION_BACKENDS}")
        self._require("revision", self.revision != "", "a branch, tag or commit")
        self._require("depth", self.depth in (None, 0, 1), "0, 1 or None")
        if self.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}: only 1 is supported; "
                "run one engine per device instead"
            )

    def _require(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: the base and how its frequencies are scaled for longer contexts."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[
        float, ...
    ] = ()  # kind "factors": one divisor per frequency, as GGUF stores them


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and constants that a decoder-only family needs, read from config.json's layout."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    attention_bias: bool
    mlp_bias: bool


def read_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read a config in transformers 4 or 5 layout; refuse by name what would change the numbers."""
    hidden_size, num_heads = _field(config, "hidden_size"), _field(config, "num_attention_heads")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"hidden_act {config['hidden_act']!r}: only 'silu' is supported"
        )
    if config.get("use_sliding_window") or config.get("quantization_config"):
        name = "use_sliding_window" if config.get("use_sliding_window") else "quantization_config"
        raise UnsupportedModelError(f"{name}={config[name]!r} in config.json is not supported")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return ModelConfig(
        architecture=read_architecture(config),
        vocab_size=_field(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_field(config, "intermediate_size"),
        num_layers=_field(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        rms_norm_eps=_field(config, "rms_norm_eps"),
        rope=read_rope_config(config),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        max_position_embeddings=_field(config, "max_position_embeddings"),
        dtype=dtype if dtype in DTYPES else "float32",
        attention_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
    )


def read_architecture(config: Mapping[str, Any]) -> str:
    names: list[str] = list(config.get("architectures") or ())
    if len(names) != 1:
        raise CheckpointError(f"config.json must name one entry in architectures, got {names}")
    return names[0]


def read_rope_config(config: Mapping[str, Any]) -> RopeConfig:
    """transformers 5 has `rope_parameters`; 4 has `rope_theta` and `rope_scaling`."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_field(scaling, "factor"))
    if kind == "factors":
        return RopeConfig(theta=theta, kind=kind, factors=tuple(_field(scaling, "factors")))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_field(scaling, "factor"),
        low_freq_factor=_field(scaling, "low_freq_factor"),
        high_freq_factor=_field(scaling, "high_freq_factor"),
        original_max_position=_field(scaling, "original_max_position_embeddings"),
    )


def _field(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise CheckpointError(
            f"config.json has no {name!r}; is this a decoder-only language model?"
        )
    return config[name]
