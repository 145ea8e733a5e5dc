"""Every value of config.json has a type and a range; what is outside is named at once."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.bench.models import model_names, model_path
from nanovllm.checkpoint.folder import read_json
from nanovllm.errors import CheckpointError
from nanovllm.models import config_fields
from nanovllm.models.config_fields import FIELDS, Number
from nanovllm.models.registry import read_config
from tests.models.test_configs import CONFIGS, saved

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZES = [name for name, field in FIELDS.items() if isinstance(field, Number) and field.is_whole]


def names_read(tree: ast.AST) -> Iterator[str]:
    """The names in `config.get(name)`, `config[name]` and `field(config, name)`."""
    for node in ast.walk(tree):
        arguments: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".get", "field")):
            arguments = node.args
        elif isinstance(node, ast.Subscript):
            arguments = [node.slice]
        values = [a.value for a in arguments if isinstance(a, ast.Constant)]
        yield from (value for value in values if isinstance(value, str))


def test_every_field_that_is_read_has_a_range() -> None:
    files = Path(config_fields.__file__).parent.glob("*.py")
    names = {name for file in files for name in names_read(ast.parse(file.read_text()))}
    assert {"hidden_size", "beta_fast", "query_pre_attn_scalar"} < names
    assert names - FIELDS.keys() == {"architectures", "quantization_config"}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_whole_numbers_in_a_range(name: str) -> None:
    high = FIELDS[name].high  # type: ignore[union-attr]
    for odd in (-1, 2.5, 8.0, "8", [8], {"a": 8}, True, high + 1, 2**63, 10**30, float("nan")):
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
            ({"architectures": odd}, "one entry in architectures")
            for odd in ("LlamaForCausalLM", {"LlamaForCausalLM": 1}, [1], 3, [], None, [["x"]])
        ),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "no multiple of num_key_value_h"),
        ({"head_dim": 25}, "25 dimensions has no pairs"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": ["silu"]}, "hidden_act must be a string"),
        ({"dtype": 16}, "dtype must be a string"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {**YARN, "beta_fast": -1.0}}, "rope_parameters: beta_fast must be"),
        ({"rope_parameters": {**YARN, "beta_slow": 0}}, "beta_slow must be a number"),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta must be a number"),
        ({"rope_parameters": {**YARN, "factor": float("inf")}}, "factor must be a number"),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "must be below high_freq_fac"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "more than"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [1.0] * 3}}, "3 factors for 12"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [0.0] * 12}}, "positive numbers"),
        ({"rope_parameters": {"rope_type": "factors", "factors": 1.0}}, "positive numbers"),
    ],
)
def test_odd_values_are_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_config({**saved("llama"), **changes})


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3-six", {"sliding_window_pattern": 0, "layer_types": None}, "window_pattern"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "rope_theta"),
        ("gemma3", {"rope_parameters": {"full_attention": 3}}, "full_attention must be an object"),
        ("qwen2-window", {"layer_types": "full_attention"}, "layer_types must be a list"),
        ("qwen2-window", {"layer_types": [1, 2]}, "layer_types must be a list of strings"),
        ("qwen3-moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers must be a list"),
        ("qwen3-moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list"),
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
