"""Decoders that are not a family of our own run in transformers' model code, where possible."""

from nanovllm.models.fallback.transformers_family import (
    build_model,
    check_options,
    load_model,
    read_config,
)
from nanovllm.models.fallback.transformers_model import TransformersModel

__all__ = ["TransformersModel", "build_model", "check_options", "load_model", "read_config"]
