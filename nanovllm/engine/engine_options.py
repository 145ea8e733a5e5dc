"""Types of the keyword arguments of `LLM` and `AsyncLLM`, and handling of vLLM's options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TEXT_ONLY = "this model reads text only"
# vLLM's options that have no effect here, each with the reason; ignored with a warning if set.
# Flags:
IGNORED_OPTIONS = {
    "trust_remote_code": "code from a repository is never run",
    "enable_auto_tool_choice": "tool calls are parsed whenever a request has tools",
    "enable_chunked_prefill": "long prompts are always prefilled in chunks",
    "async_scheduling": "it is used where it helps",
    "disable_log_requests": "prompts are never logged",
    "enable_log_requests": "prompts are never logged",
    "disable_log_stats": "use --log-level warning to hide statistics",
    "disable_uvicorn_access_log": "requests are logged only with --verbose",
    "disable_frontend_multiprocessing": "the engine always has its own process",
    "enable_server_load_tracking": "/load is always available",
    "enable_prompt_tokens_details": "usage always includes the cached tokens",
    "enable_force_include_usage": "streams include usage if the request asks for it",
    "disable_custom_all_reduce": "there is no custom all-reduce kernel",
    "enable_expert_parallel": "experts are sharded like the other weights",
}
# Options that take a value:
IGNORED_WITH_VALUE = {
    "swap_space": "there is no swap space",
    "uvicorn_log_level": "use --log-level",
    "max_log_len": "prompts are never logged",
    "tokenizer_mode": "the model's own tokenizer is used",
    "compilation_config": "graphs are on unless --enforce-eager",
    "max_seq_len_to_capture": "sequences of any length use CUDA graphs",
    "guided_decoding_backend": "structured output has one backend",
    "structured_outputs_config": "structured output has one backend",
    "scheduling_policy": "requests are served by priority, then in order of arrival",
    "mm_processor_kwargs": "images are resized as the checkpoint defines",
    "media_io_kwargs": "images are always read as RGB",
    "allowed_local_media_path": "requests never read files",
    "mm_processor_cache_gb": "the cache of image embeddings takes up to 1 GiB",
    "response_role": "the role is always assistant",
}
# Unsupported options, and the values that are accepted because they equal the default behavior.
UNSUPPORTED_OPTIONS = {
    "pipeline_parallel_size": ("1",),
    "cpu_offload_gb": ("0", "0.0"),
    "hf_overrides": (),
    "rope_scaling": (),
    "tokenizer": (),
}

LORA_FLAGS = ("enable_lora", "fully_sharded_loras")
LORA_OPTIONS = (
    *LORA_FLAGS,
    *("lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype"),
)
FLAGS = (*IGNORED_OPTIONS, *LORA_FLAGS)
VLLM_OPTIONS = (*IGNORED_OPTIONS, *IGNORED_WITH_VALUE, *UNSUPPORTED_OPTIONS, *LORA_OPTIONS)


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of `LLM`: the fields of EngineConfig except `model`, and `block_size`."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    enforce_eager: bool
    kvcache_block_size: int
    block_size: int  # vLLM's name for kvcache_block_size
    num_kvcache_blocks: int
    device: Literal["auto", "cpu", "cuda"]
    dtype: str | torch.dtype
    seed: int
    enable_prefix_caching: bool
    load_format: Literal["auto", "dummy"]
    skip_tokenizer_init: bool
    attention_backend: Literal["auto", "triton", "sdpa", "flash_attn"]
    depth: int | None
    target_inter_token_ms: float | None
    step_timeout: float
    revision: str | None
    distributed_executor_backend: Literal["mp", "uni", "ray"]
    data_parallel_size: int
    kv_cache_dtype: str
    quantization: str | None
    speculative_config: Mapping[str, Any] | None
    limit_mm_per_prompt: Mapping[str, int] | None
    model_impl: Literal["auto", "nanovllm", "transformers"]


def drop_vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under nanovllm's names; drop those without effect, with a warning."""
    for note in ignored_notes(options):
        logger.warning("%s", note)
    own = {name: value for name, value in options.items() if name not in VLLM_OPTIONS}
    if "block_size" in own:
        if "kvcache_block_size" in own:
            raise TypeError("block_size is another name for kvcache_block_size; pass only one")
        own["kvcache_block_size"] = own.pop("block_size")
    return own


def ignored_notes(options: Mapping[str, Any], spell: Callable[[str], str] = str) -> Iterator[str]:
    """Yield a warning for each vLLM option without effect; raise for unsupported ones."""
    for name, reason in (IGNORED_OPTIONS | IGNORED_WITH_VALUE).items():
        if options.get(name):
            yield f"{spell(name)} has no effect: {reason}"
    for name in LORA_OPTIONS:
        if options.get(name):
            raise ConfigError(f"{spell(name)}: LoRA adapters are not supported; leave it out")
    for name, neutral in UNSUPPORTED_OPTIONS.items():
        value = options.get(name)
        if value is not None:
            if str(value).lower() not in neutral:
                raise ConfigError(f"{spell(name)} {value} is not supported")
            yield f"{spell(name)} {value} has no effect"
