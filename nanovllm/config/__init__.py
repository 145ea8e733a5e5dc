"""The options of an engine, and the sizes and constants of a model."""

from nanovllm.config.engine_config import (
    DEFAULT_LEN,
    DTYPES,
    QUANTIZATION_METHODS,
    EngineConfig,
    serving_target,
)
from nanovllm.config.model_config import (
    ConfigJson,
    ExpertsConfig,
    LayerAttention,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
)
from nanovllm.config.option_text import WHOLE_CONTEXT
from nanovllm.config.speculative_config import SpeculativeConfig

__all__ = [
    "DEFAULT_LEN",
    "DTYPES",
    "QUANTIZATION_METHODS",
    "WHOLE_CONTEXT",
    "ConfigJson",
    "EngineConfig",
    "ExpertsConfig",
    "LayerAttention",
    "ModelConfig",
    "RecurrentConfig",
    "RopeConfig",
    "SpeculativeConfig",
    "serving_target",
]
