"""Which architecture is built by which family file."""

from __future__ import annotations

from nanovllm.config import ModelConfig
from nanovllm.errors import UnsupportedModelError
from nanovllm.layers.build import Build
from nanovllm.models import llama, qwen3
from nanovllm.models.decoder import BuildLayer, DecoderModel

FAMILIES: dict[str, BuildLayer] = {
    "LlamaForCausalLM": llama.build_layer,
    "Qwen3ForCausalLM": qwen3.build_layer,
}


def build_model(config: ModelConfig, max_model_len: int, build: Build) -> DecoderModel:
    return DecoderModel(config, max_model_len, build, FAMILIES[config.architecture])


def check_architecture(name: str) -> None:
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported; supported: {supported}"
        )
