"""The configs in benchmarks/, compared with transformers and the published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.floors import model_cost
from benchmarks.models import model_path
from nanovllm.models.registry import read_config

# Parameters of the published checkpoints; a tied embedding counts once. Those of Qwen3.5 are its
# text model's, without the vision encoder and the MTP layer.
SIZES = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-9b": 8_953_803_264,
}


def read(name: str) -> dict[str, Any]:
    return dict(json.loads(Path(model_path(name)).read_text()))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name: str) -> None:
    """transformers creates as many parameters as published, and our costs count its matrices."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**read(name)))
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name]
    config = read_config(read(name))
    cost = model_cost(config, itemsize=2)
    matrices = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        # These have one row per layer, or four elements per channel, and are not counted.
        if parameter.dim() > 1 and not name.endswith(("conv1d.weight", "shared_expert_gate.weight"))
    )
    embedding = 0 if config.tie_word_embeddings else cost.head_weights
    experts = cost.num_experts * cost.expert_weights
    assert cost.layer_weights + experts + cost.head_weights + embedding == matrices
