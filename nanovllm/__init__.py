"""nanovllm: a small, fast LLM inference engine that can be read in an afternoon."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.llm import LLM
    from nanovllm.outputs import EmbeddingOutput, Logprob, RequestOutput
    from nanovllm.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "EmbeddingOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "nanovllm.llm",
    "AsyncLLM": "nanovllm.async_llm",
    "EmbeddingOutput": "nanovllm.outputs",
    "Logprob": "nanovllm.outputs",
    "RequestOutput": "nanovllm.outputs",
    "SamplingParams": "nanovllm.sampling_params",
}


def __getattr__(name: str) -> object:
    """Import a public name on first access, so that `nanovllm --help` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
