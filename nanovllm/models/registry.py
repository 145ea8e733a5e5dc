"""The registry of model families: the config reader and layer builder of each architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.errors import (
    CheckpointError,
    NanovllmError,
    UnsupportedModelError,
    UnsupportedQuantisationError,
)
from nanovllm.layers.build import BuildContext
from nanovllm.models import (
    gemma,
    glm4,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    smollm3,
)
from nanovllm.models.config_json import (
    check_fields,
    check_model,
    read_architecture,
    read_model_config,
)
from nanovllm.models.decoder import BuildLayer, DecoderModel

if TYPE_CHECKING:
    from nanovllm.models.fallback import TransformersModel

    Model = DecoderModel | TransformersModel


@dataclass(frozen=True, slots=True)
class Family:
    build_layer: BuildLayer
    read_config: Callable[[ConfigJson], ModelConfig]


FAMILIES = {
    "Gemma2ForCausalLM": Family(gemma.build_gemma2_layer, gemma.read_gemma2_config),
    "Gemma3ForCausalLM": Family(gemma.build_layer, gemma.read_config),
    "Glm4ForCausalLM": Family(glm4.build_layer, glm4.read_config),
    "GlmForCausalLM": Family(glm4.build_glm_layer, glm4.read_config),
    "GraniteForCausalLM": Family(llama.build_layer, granite.read_config),
    "LlamaForCausalLM": Family(llama.build_layer, read_model_config),
    "MinistralForCausalLM": Family(llama.build_layer, mistral.read_config),
    "Ministral3ForCausalLM": Family(llama.build_layer, mistral.read_ministral3_config),
    "MistralForCausalLM": Family(llama.build_layer, mistral.read_config),
    "MixtralForCausalLM": Family(mixtral.build_layer, mixtral.read_config),
    "Olmo2ForCausalLM": Family(olmo2.build_layer, olmo2.read_config),
    "Olmo3ForCausalLM": Family(olmo2.build_layer, olmo2.read_olmo3_config),
    "Phi3ForCausalLM": Family(phi3.build_layer, phi3.read_config),
    "Qwen2ForCausalLM": Family(llama.build_layer, qwen2.read_config),
    "Qwen3ForCausalLM": Family(qwen3.build_layer, qwen3.read_config),
    "Qwen3NextForCausalLM": Family(qwen3_5.build_next_layer, qwen3_5.read_moe_config),
    "Qwen3_5ForCausalLM": Family(qwen3_5.build_layer, qwen3_5.read_config),
    "Qwen3_5MoeForCausalLM": Family(qwen3_5.build_layer, qwen3_5.read_moe_config),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.build_layer, qwen3_moe.read_config),
    "SmolLM3ForCausalLM": Family(llama.build_layer, smollm3.read_config),
}


def read_config_for(config: ConfigJson, model_impl: str) -> ModelConfig:
    """Read config.json for our own model code or, as far as `model_impl` allows, transformers'."""
    if model_impl == "transformers":
        return fallback().read_config(config)
    try:
        return read_config(config)
    except UnsupportedModelError as own:
        if model_impl == "nanovllm" or isinstance(own, UnsupportedQuantisationError):
            raise
        try:
            return fallback().read_config(config)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{own}; {error}") from error


def read_config(config: ConfigJson) -> ModelConfig:
    """Read config.json with its family's reader; an invalid value raises CheckpointError."""
    name = read_architecture(config)
    if name not in FAMILIES:
        architecture, supported = config["architectures"][0], ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported: {supported}"
        )
    check_fields(config)
    try:
        model = FAMILIES[name].read_config(config)
    except NanovllmError:
        raise
    except Exception as error:  # a type or range that the family did not expect
        raise CheckpointError(f"config.json has an invalid value ({error!r:.200})") from error
    check_model(model)
    return model


def build_model(config: ModelConfig, max_model_len: int, build: BuildContext) -> Model:
    """Create a model whose weights are not loaded; a TransformersModel is on the meta device."""
    if config.transformers_config is not None:
        return fallback().build_model(config, build)
    return DecoderModel(config, max_model_len, build, FAMILIES[config.architecture].build_layer)


def fallback() -> ModuleType:
    """Import the fallback on demand; the package also works without its folder."""
    name = "nanovllm.models.fallback"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        text = "transformers' model code cannot run: nanovllm/models/fallback is missing"
        raise UnsupportedModelError(text) from error
