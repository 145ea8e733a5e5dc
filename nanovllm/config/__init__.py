"""The options of an engine, and the sizes and constants of a model."""

from nanovllm.config.engine_config import (
    DEFAULT_LEN,
    DTYPES,
    QUANTIZATION_METHODS,
    SERVING_TARGET_MS,
    WHOLE_CONTEXT,
    EngineConfig,
)
from nanovllm.config.model_config import (
    ConfigJson,
    ExpertsConfig,
    LayerAttention,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
)
from nanovllm.config.speculative_config import SpeculativeConfig

__all__ = [
    "DEFAULT_LEN",
    "DTYPES",
    "QUANTIZATION_METHODS",
    "SERVING_TARGET_MS",
    "WHOLE_CONTEXT",
    "ConfigJson",
    "EngineConfig",
    "ExpertsConfig",
    "LayerAttention",
    "ModelConfig",
    "RecurrentConfig",
    "RopeConfig",
    "SpeculativeConfig",
]
