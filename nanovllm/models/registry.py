"""Which architecture is built by which family file, and what models have it."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.config import ModelConfig
from nanovllm.errors import UnsupportedModelError
from nanovllm.layers.build import Build
from nanovllm.models import llama, qwen3
from nanovllm.models.decoder import BuildLayer, DecoderModel


@dataclass(frozen=True, slots=True)
class Family:
    build_layer: BuildLayer
    examples: tuple[str, ...]  # hub ids, for `nanovllm models`


FAMILIES = {
    "LlamaForCausalLM": Family(
        llama.build_layer,
        (
            "meta-llama/Llama-2-7b-chat-hf",
            "meta-llama/Llama-3.1-8B-Instruct",
            "meta-llama/Llama-3.2-1B-Instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    ),
    "Qwen3ForCausalLM": Family(
        qwen3.build_layer,
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
    ),
}


def build_model(config: ModelConfig, max_model_len: int, build: Build) -> DecoderModel:
    return DecoderModel(config, max_model_len, build, FAMILIES[config.architecture].build_layer)


def check_architecture(name: str) -> None:
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported; supported: {supported}"
        )
