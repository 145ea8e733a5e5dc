"""Invalid values in config.json raise a CheckpointError, which names the field of a size."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import model_names, model_path
from nanovllm.checkpoint.folder_files import read_json
from nanovllm.errors import CheckpointError
from nanovllm.models.config_json import SIZES
from nanovllm.models.registry import read_config
from tests.models.test_configs import CONFIGS, saved

INVALID = "config.json has an invalid value"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("odd", [-1, 2.5, 8.0, "8", [8], True, 10**30, float("nan")], ids=repr)
def test_sizes_are_whole_numbers_in_a_range(name: str, odd: object) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {name} must be a whole number"):
        read_config({**saved("llama"), name: odd})


@pytest.mark.parametrize("num_layers", [10**6, 4 * 10**8, 10**18])
def test_no_time_is_spent_on_absurd_sizes(num_layers: int) -> None:
    start = time.process_time()
    for name in CONFIGS:
        with pytest.raises(CheckpointError, match="num_hidden_layers must be"):
            read_config({**saved(name), "num_hidden_layers": num_layers})
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        *(
            ({"architectures": odd}, "list exactly one architecture")
            for odd in ("LlamaForCausalLM", {"LlamaForCausalLM": 1}, [1], 3, [], None, [["x"]])
        ),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "not a multiple of num_key_value_h"),
        ({"head_dim": 25}, "head_dim=25 must be even"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be of type float"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number, got NaN"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be of type bool"),
        ({"hidden_act": ["silu"]}, INVALID),
        ({"rope_parameters": [1]}, INVALID),
        ({"rope_parameters": {**YARN, "beta_fast": "32"}}, "beta_fast must be of type float"),
        ({"rope_parameters": {**YARN, "rope_theta": "1e4"}}, "theta must be of type float"),
        ({"rope_parameters": {**YARN, "factor": "4"}}, INVALID),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta must be above 0, got 0"),
        *(
            ({"rope_parameters": {"rope_theta": theta}}, message)
            for theta, message in (
                (0, "rope_theta must be above 0, got 0"),
                (-1e4, "rope_theta must be above 0, got -10000.0"),
                (math.nan, "rope_theta must be a number, got NaN"),
            )
        ),
        *(
            ({"rope_parameters": {**YARN, "rope_type": kind, "factor": 0}}, "rope factor must be a")
            for kind in ("linear", "dynamic", "yarn")
        ),
        ({"rope_parameters": {"rope_type": "factors", "factors": [1.0] * 3}}, "3 rope factors for"),
        ({"rope_parameters": {"rope_type": "factors", "factors": 1.0}}, INVALID),
    ],
)
def test_odd_values_are_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_config({**saved("llama"), **changes})


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("gemma3", {"query_pre_attn_scalar": 0}, INVALID),
        ("gemma3-six", {"sliding_window_pattern": 0, "layer_types": None}, INVALID),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "theta must be"),
        ("gemma3", {"rope_parameters": {"full_attention": 3}}, INVALID),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "theta must be ab"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier=0 must be"),
        ("granite", {"logits_scaling": 0}, INVALID),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attention_softcap must be"),
        ("qwen2-window", {"layer_types": "full_attention"}, "layer_types"),
        ("qwen2-window", {"layer_types": [1, 2]}, "layer_types 1, 2: only"),
        ("qwen3-moe", {"mlp_only_layers": 1}, INVALID),
        ("qwen3-moe", {"moe_intermediate_size": 0}, "experts of size 0"),
        ("mixtral", {"num_local_experts": 0}, "of 0 experts"),
    ],
)
def test_odd_values_of_families(name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_config({**saved(name), **changes})


def test_no_real_config_is_refused() -> None:
    for name in model_names():
        read_config(read_json(Path(model_path(name))))


def test_a_window_of_nothing_is_none() -> None:
    layers = read_config({**saved("mistral"), "sliding_window": 0}).layers
    assert [layer.window for layer in layers] == [None, None]
