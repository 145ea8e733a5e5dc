"""EngineConfig: the validated options of an engine. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm.config.option_text import json_object, mm_limits, tokens
from nanovllm.config.speculative_config import SpeculativeConfig
from nanovllm.errors import ConfigError
from nanovllm.validation import (
    check_choices,
    check_types,
    has_folder,
    option,
    require,
    suggest_fields,
)

DEFAULT_LEN = 4096  # default max_model_len; the model's own limit if that is less
DEFAULT_IMAGES = 16  # most images per prompt
NO_MEDIA = (("video", 0), ("audio", 0))  # the only limits of these
DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # the last two are synonyms
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # aliases in PyTorch and vLLM
QUANTIZATION_METHODS = ("fp8", "compressed-tensors", "awq", "gptq")  # vLLM's names
_COUNTS = ("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size", "data_parallel_size")


def serving_target() -> float | None:
    """Return the default target_inter_token_ms of AsyncLLM and of servers."""
    return 25.0 if has_folder("nanovllm.features.latency") else None


@suggest_fields
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of `LLM(...)`; the first nine have nano-vLLM's names."""

    model: str
    max_num_batched_tokens: int = option(
        16384, "maximum tokens per step; longer prompts are prefilled in chunks", parse=tokens
    )
    max_num_seqs: int = option(512, "maximum running sequences; others wait")
    max_model_len: int = option(
        DEFAULT_LEN,
        "maximum length of prompt plus output in tokens, such as 32K; at most the model's own",
        parse=tokens,
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
        -1,
        "blocks in the KV cache, for each group of layers; -1: as memory allows",
        alias="--num-gpu-blocks-override",
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
    depth: int | None = option(
        None,
        "1: plan a step while the previous one runs (asynchronous scheduling); 0: do not",
        unset="the device's default",
    )
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
    kv_cache_dtype: str = option(
        "auto", "fp8: holds nearly twice as many tokens; auto: same as dtype"
    )
    quantization: str | None = option(
        None,
        "fp8: quantize weights while loading; a quantized checkpoint accepts only its own method",
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
    limit_mm_per_prompt: Mapping[str, int] | None = option(
        None,
        'JSON: {"image": 4} limits the images of a prompt; with 0, the vision tower is not loaded',
        hash=False,
        parse=mm_limits,
        unset=f"{DEFAULT_IMAGES} images",
    )
    model_impl: Literal["auto", "nanovllm", "transformers"] = option(
        "auto",
        "model code: nanovllm, or transformers, which is slower; auto prefers nanovllm",
    )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The validated options of speculative decoding; None if it is off."""
        options = self.speculative_config
        return None if options is None else SpeculativeConfig.read(options)

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of draft tokens per sequence; 0 without speculative decoding."""
        return 0 if self.speculative is None else self.speculative.num_speculative_tokens

    @property
    def max_images(self) -> int:
        """Maximum number of images in a prompt; 0: the model runs without its vision tower."""
        return (self.limit_mm_per_prompt or {}).get("image", DEFAULT_IMAGES)

    @property
    def max_num_rows(self) -> int:
        """Maximum number of rows that a step samples: one per sequence, plus draft tokens."""
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
            "max_model_len", self.max_model_len >= 2, "at least 2: a prompt and an output token"
        )
        self._require("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]")
        is_multiple = self.kvcache_block_size >= 16 and self.kvcache_block_size % 16 == 0
        self._require("kvcache_block_size", is_multiple, "a multiple of 16")
        is_count = self.num_kvcache_blocks == -1 or self.num_kvcache_blocks >= 1
        self._require("num_kvcache_blocks", is_count, "at least 1, or -1 to size it from memory")
        self._require("dtype", self.dtype in ("auto", *DTYPES), f"'auto' or one of {DTYPES}")
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size > 1:
            size = self.tensor_parallel_size
            raise ConfigError(f"tensor_parallel_size={size} needs backend 'mp' or 'ray', not 'uni'")
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
        self._require("target_inter_token_ms", is_time, "a number of milliseconds above 0, or None")
        self._require("depth", self.depth in (None, 0, 1), "0, 1 or None")
        if self.speculative_config is not None:
            SpeculativeConfig.read(self.speculative_config)
        limits = {} if self.limit_mm_per_prompt is None else self.limit_mm_per_prompt
        is_valid = isinstance(limits, Mapping) and all(
            type(limit) is int and limit >= 0 and (name == "image" or (name, limit) in NO_MEDIA)
            for name, limit in limits.items()
        )
        expected = 'a dict such as {"image": 4}; videos and audio are not supported'
        self._require("limit_mm_per_prompt", is_valid, expected)
        is_time = 0 <= self.step_timeout < float("inf")
        self._require("step_timeout", is_time, "a number of seconds, or 0 for no limit")

    @property
    def optimizes_latency(self) -> bool:
        """Whether latency has priority; graphs are then captured before the first request."""
        return self.target_inter_token_ms is not None

    def _require(self, name: str, is_valid: bool, expected: str) -> None:
        require(is_valid, name, expected, getattr(self, name), ConfigError)
