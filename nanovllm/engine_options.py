"""Keyword arguments of `LLM` and `AsyncLLM`: their types, and vLLM's without an effect here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# What is so in any case, or concerns what this engine does not have: said once and left aside.
IGNORED_OPTIONS = {
    "trust_remote_code": "code from a repository is never run",
    "enable_auto_tool_choice": "tool calls are read wherever a request has tools",
    "enable_chunked_prefill": "long prompts are always read in chunks",
    "async_scheduling": "steps are planned ahead where that helps",
    "disable_log_requests": "prompts are never logged",
    "enable_log_requests": "prompts are never logged",
    "disable_log_stats": "--log-level warning leaves them out",
    "disable_uvicorn_access_log": "requests are logged with --verbose",
    "disable_frontend_multiprocessing": "the engine has a process of its own",
    "enable_server_load_tracking": "/load is always there",
    "enable_prompt_tokens_details": "usage always has the cached tokens",
    "enable_force_include_usage": "streams have usage where a request asks for it",
    "disable_custom_all_reduce": "there is no such kernel",
    "enable_expert_parallel": "experts are split with the other weights",
}
IGNORED_WITH_VALUE = {
    "swap_space": "there is no swap space",
    "uvicorn_log_level": "use --log-level",
    "max_log_len": "prompts are never logged",
    "tokenizer_mode": "the model's own tokenizer is used",
    "compilation_config": "graphs are on unless --enforce-eager",
    "max_seq_len_to_capture": "graphs do not depend on lengths",
    "guided_decoding_backend": "structured output has one backend",
    "structured_outputs_config": "structured output has one backend",
    "scheduling_policy": "requests are served by priority, then in order",
    "limit_mm_per_prompt": "models read text only",
    "response_role": "answers are the assistant's",
}
# What would change the answers or the speed, with the values that ask for nothing.
UNSUPPORTED_OPTIONS = {
    "speculative_config": ("none",),
    "pipeline_parallel_size": ("1",),
    "cpu_offload_gb": ("0", "0.0"),
    "lora_modules": (),
    "hf_overrides": (),
    "rope_scaling": (),
    "tokenizer": (),
}

VLLM_OPTIONS = (*IGNORED_OPTIONS, *IGNORED_WITH_VALUE, *UNSUPPORTED_OPTIONS)


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig, for completion in editors and for type checkers."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    enforce_eager: bool
    kvcache_block_size: int
    block_size: int  # vLLM's name of kvcache_block_size
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


def drop_vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Warn of options that only vLLM needs, and leave them out."""
    for note in ignored_notes(options):
        logger.warning("%s", note)
    own = {name: value for name, value in options.items() if name not in VLLM_OPTIONS}
    if "block_size" in own:
        if "kvcache_block_size" in own:
            raise TypeError("block_size is another name of kvcache_block_size; give one of them")
        own["kvcache_block_size"] = own.pop("block_size")
    return own


def ignored_notes(options: Mapping[str, Any], spell: Callable[[str], str] = str) -> Iterator[str]:
    """Name vLLM's options that are given and change nothing; refuse what is not built."""
    for name, reason in (IGNORED_OPTIONS | IGNORED_WITH_VALUE).items():
        if options.get(name):
            yield f"{spell(name)} changes nothing: {reason}"
    for name, harmless in UNSUPPORTED_OPTIONS.items():
        value = options.get(name)
        if value is not None:
            if str(value).lower() not in harmless:
                raise ConfigError(f"{spell(name)} {value} is not supported")
            yield f"{spell(name)} {value} changes nothing"
