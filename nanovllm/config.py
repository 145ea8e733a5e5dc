"""EngineConfig (the user's options) and ModelConfig (read from the checkpoint); torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from nanovllm.errors import ConfigError
from nanovllm.validation import check_choices, check_types, option, require, suggest_fields

WHOLE_CONTEXT = 2**31 - 1  # a max_model_len that stands for the model's own limit
SERVING_TARGET_MS = 25.0  # default target_inter_token_ms of AsyncLLM and of servers
MAX_SPECULATIVE_TOKENS = 32
DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # the last two are synonyms
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # aliases in PyTorch and vLLM
QUANTIZATION_METHODS = ("fp8", "compressed-tensors", "awq", "gptq")  # vLLM's names
_COUNTS = ("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size", "data_parallel_size")


def tokens(text: str) -> int:
    """Parse a number of tokens as vLLM does: 1k is 1000, 1K is 1024, auto is the model's limit."""
    if text == "auto":
        return WHOLE_CONTEXT
    factors = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
    number = float(text[:-1]) * factors[text[-1]] if text[-1:] in factors else int(text)
    if math.isinf(number):
        raise ValueError
    return round(number)


def json_object(text: str) -> Any:
    """Parse JSON; argparse names this function in its error message."""
    return json.loads(text)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The content of `EngineConfig.speculative_config`, under vLLM's names."""

    method: Literal["ngram", "suffix", "draft_model"]
    num_speculative_tokens: int = 7
    model: str | None = None  # only for "draft_model"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """Check the options and return them as a record."""
        require(isinstance(options, Mapping), "speculative_config", "a dict", options, ConfigError)
        known = [each.name for each in fields(cls)]
        for name in options:
            require(name in known, "speculative_config", f"made of {known}", name, ConfigError)
        config = cls(**{"method": None, **options})
        check_choices(config)
        has_model = isinstance(config.model, str) and config.model != ""
        is_needed = config.method == "draft_model"
        expected = "a hub id or a folder" if is_needed else "given only with method draft_model"
        is_given = has_model if is_needed else config.model is None
        require(is_given, "speculative_config model", expected, config.model, ConfigError)
        count = config.num_speculative_tokens
        is_count = type(count) is int and 1 <= count <= MAX_SPECULATIVE_TOKENS
        expected = f"between 1 and {MAX_SPECULATIVE_TOKENS}"
        require(is_count, "num_speculative_tokens", expected, count, ConfigError)
        return config


@suggest_fields
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of `LLM(...)`; the first nine are the same as in nano-vLLM."""

    model: str
    max_num_batched_tokens: int = option(
        16384, "maximum tokens per step; longer prompts are prefilled in chunks", parse=tokens
    )
    max_num_seqs: int = option(512, "maximum running sequences; others wait")
    max_model_len: int = option(
        4096, "maximum length of prompt plus output in tokens, such as 32K", parse=tokens
    )
    gpu_memory_utilization: float = option(0.9, "fraction of a GPU's memory to use")
    tensor_parallel_size: int = option(
        1, "number of GPUs, or CPU processes, to shard the model over", alias="-tp"
    )
    enforce_eager: bool = option(False, "run without CUDA graphs or captured steps, for debugging")
    kvcache_block_size: int = option(
        64, "tokens per KV-cache block, a multiple of 16", alias="--block-size"
    )
    num_kvcache_blocks: int = option(
        -1, "blocks in the KV cache; -1: as memory allows", alias="--num-gpu-blocks-override"
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to run; auto prefers a GPU")
    dtype: str = option(
        "auto", "float32, bfloat16 or float16; auto depends on the model and the device"
    )
    seed: int = option(0, "seed for requests that do not set one")
    enable_prefix_caching: bool = option(
        True, "reuse the KV cache of shared prompt prefixes", alias="--prefix-caching"
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy: random weights, needs only config.json"
    )
    skip_tokenizer_init: bool = option(False, "accept and return token ids only, no text")
    attention_backend: Literal["auto", "triton", "sdpa", "flash_attn"] = option(
        "auto",
        "auto: the fastest; sdpa: a reference in plain torch; flash_attn: the flash-attn package",
    )
    depth: int | None = option(None, "steps planned ahead: 0 or 1", unset="the device's default")
    target_inter_token_ms: float | None = option(
        None,
        "limit prefill chunks so that running requests get a token about this often",
        unset="none, for throughput; AsyncLLM and serve: 25",
    )
    step_timeout: float = option(
        300.0, "seconds after which the watchdog treats a step as hung; 0: no watchdog"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub model", unset="main")
    distributed_executor_backend: Literal["mp", "uni", "ray"] = option(
        "mp",
        "mp: ranks are local processes; ray: actors on a cluster; uni: one rank in this process",
    )
    data_parallel_size: int = option(1, "number of replicas that share the requests", alias="-dp")
    kv_cache_dtype: str = option("auto", "fp8 fits nearly twice the tokens; auto: same as dtype")
    quantization: str | None = option(
        None,
        "fp8: quantize weights while loading; a quantized checkpoint accepts only its method",
        alias="-q",
        unset="the checkpoint's own",
    )
    speculative_config: Mapping[str, Any] | None = option(
        None,
        "JSON: method (ngram, suffix or draft_model), num_speculative_tokens, model",
        hash=False,
        parse=json_object,
        unset="no drafts",
    )
    model_impl: Literal["auto", "nanovllm", "transformers"] = option(
        "auto",
        "model code: nanovllm, or transformers, which is slower; auto prefers nanovllm",
    )

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of drafts of a row; 0 without speculative decoding."""
        if self.speculative_config is None:
            return 0
        return SpeculativeConfig.read(self.speculative_config).num_speculative_tokens

    @property
    def draft_model(self) -> str | None:
        """The draft model of speculative decoding, if it has one."""
        if self.speculative_config is None:
            return None
        return SpeculativeConfig.read(self.speculative_config).model

    @property
    def max_num_rows(self) -> int:
        """Maximum number of rows that a step samples: one per sequence, and the drafts."""
        return self.max_num_seqs + self.num_speculative_tokens

    def __post_init__(self) -> None:
        if type(self.dtype).__name__ == "dtype":  # a torch.dtype, without importing torch
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        check_types(self)
        check_choices(self)
        object.__setattr__(self, "dtype", DTYPE_NAMES.get(self.dtype, self.dtype))
        if self.quantization == "none":
            object.__setattr__(self, "quantization", None)
        for name in _COUNTS:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in (*_COUNTS, "max_model_len", "kvcache_block_size", "num_kvcache_blocks"):
            self._require(name, getattr(self, name) < 2**31, "below 2**31")
        self._require(
            "max_model_len", self.max_model_len >= 2, "at least 2: one token of prompt and output"
        )
        self._require("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]")
        is_multiple = self.kvcache_block_size >= 16 and self.kvcache_block_size % 16 == 0
        self._require("kvcache_block_size", is_multiple, "a multiple of 16")
        is_count = self.num_kvcache_blocks == -1 or self.num_kvcache_blocks >= 1
        self._require("num_kvcache_blocks", is_count, "at least 1, or -1 to size it from memory")
        self._require("dtype", self.dtype in ("auto", *DTYPES), f"'auto' or one of {DTYPES}")
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size > 1:
            size = self.tensor_parallel_size
            raise ConfigError(f"tensor_parallel_size={size} needs 'mp' or 'ray', not 'uni'")
        is_known = self.kv_cache_dtype in KV_CACHE_DTYPES
        self._require("kv_cache_dtype", is_known, f"one of {KV_CACHE_DTYPES}")
        if self.kv_cache_dtype != "auto" and self.attention_backend == "flash_attn":
            raise ConfigError(
                f"attention_backend='flash_attn' does not support kv_cache_dtype="
                f"{self.kv_cache_dtype!r}; use another backend, or leave out kv_cache_dtype"
            )
        is_known = self.quantization in (None, *QUANTIZATION_METHODS)
        self._require("quantization", is_known, f"None or one of {QUANTIZATION_METHODS}")
        self._require("revision", self.revision != "", "a branch, tag or commit")
        target = self.target_inter_token_ms
        is_time = target is None or 0 < target < math.inf
        self._require("target_inter_token_ms", is_time, "a time above 0 in milliseconds, or None")
        self._require("depth", self.depth in (None, 0, 1), "0, 1 or None")
        if self.speculative_config is not None:
            SpeculativeConfig.read(self.speculative_config)
        is_time = 0 <= self.step_timeout < float("inf")
        self._require("step_timeout", is_time, "a number of seconds, or 0 for no limit")

    @property
    def optimizes_latency(self) -> bool:
        """Whether latency matters, so that graphs are captured before the first request."""
        return self.target_inter_token_ms is not None

    def _require(self, name: str, is_valid: bool, expected: str) -> None:
        require(is_valid, name, expected, getattr(self, name), ConfigError)


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
    is_interleaved: bool = False  # True: pairs are neighbors; False: rotary_dim / 2 apart


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention settings that may differ between layers."""

    rope: RopeConfig
    window: int | None = None  # sliding window in tokens; None: full attention


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
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_size: int  # number of tokens that the convolution combines
    # Whether value head i shares key head i % num_key_heads, as in GGUF files, and not neighbors.
    is_tiled: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a decoder-only model, read from its config.json."""

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
    is_causal: bool = True  # False: a token attends to later ones, too; such a model only embeds
    # config.json if transformers' own model code runs the model; None if one of our families does.
    transformers_config: Mapping[str, Any] | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_weights_per_token(self) -> int:
        """Approximate number of weights that each token is multiplied with."""
        hidden, size, experts = self.hidden_size, self.intermediate_size, self.experts
        if experts is not None:
            size = experts.top_k * experts.size + experts.shared_size
        return self.num_layers * hidden * (4 * hidden + 3 * size) + self.vocab_size * hidden
