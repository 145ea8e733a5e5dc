"""Configs of every family in both layouts, and unsupported settings, which raise by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from nanovllm.config import ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.models.registry import FAMILIES, read_config
from tests import checkpoints
from tests.checkpoints import LLAMA3_ROPE

YARN = {"rope_type": "yarn", "factor": 4.0}
CONFIGS = checkpoints.VARIANTS | checkpoints.FAMILIES
ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def saved(name: str) -> dict[str, Any]:
    """Return the config as transformers 5 writes it."""
    config = CONFIGS[name].to_dict()
    return {**config, "architectures": [ARCHITECTURES[config["model_type"]]], "dtype": "bfloat16"}


def as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same config as transformers 4 wrote it."""
    config = dict(config)
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
        if config["num_hidden_layers"] == 6:  # the pattern gives the same layers
            del config["layer_types"]
        if config["tie_word_embeddings"]:
            del config["tie_word_embeddings"]
    else:
        if "linear_num_key_heads" not in config and config["model_type"] != "ministral":
            config.pop("layer_types", None)
        rope = dict(rope.get("full_attention", rope))
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    config["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    return config


def test_every_family_has_a_config_here() -> None:
    assert {saved(name)["architectures"][0] for name in CONFIGS} == set(FAMILIES)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_both_layouts_read_the_same(name: str) -> None:
    new = saved(name)
    old = as_transformers_4(new)
    assert read_config(old) == read_config(new)
    again = AutoConfig.for_model(**old).to_dict()  # transformers agrees that they are the same
    assert again["rope_parameters"] == new["rope_parameters"]
    assert again.get("layer_types") == new.get("layer_types")


def test_windows() -> None:
    def windows(name: str, **changes: Any) -> list[int | None]:
        return [layer.window for layer in read_config({**saved(name), **changes}).layers]

    assert windows("mistral") == [20, 20]
    mixed = ["full_attention", "sliding_attention"]
    assert windows("mistral", layer_types=mixed) == [None, 20]  # like Ministral
    assert windows("mistral-whole") == windows("qwen2") == windows("llama") == [None, None]
    assert windows("qwen2-window") == [None, 20]
    assert windows("qwen2-window", layer_types=["sliding_attention"] * 2) == [20, 20]
    assert windows("qwen2-window", use_sliding_window=False) == [None, None]
    assert windows("qwen2-window", sliding_window=None) == [None, None]
    assert windows("gemma3") == [20, None]
    assert windows("gemma2") == windows("gemma2", layer_types=None) == [20, None]
    assert windows("olmo3") == windows("olmo3", layer_types=None) == [20, 20, 20, None]
    assert windows("gemma3-six") == [20, 20, 20, 20, 20, None]
    assert windows("gemma3-six", layer_types=None, sliding_window_pattern=2) == [20, None] * 3


def test_layers_with_a_window_rotate_differently() -> None:
    layers = read_config(saved("gemma3")).layers
    assert [layer.rope for layer in layers] == [RopeConfig(1e4), RopeConfig(1e6)]
    kinds = [layer.rope.kind for layer in read_config(saved("olmo3")).layers]
    assert kinds == ["default"] * 3 + ["yarn"]
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {**as_transformers_4(saved("gemma3")), "rope_scaling": scaling}
    local, whole = read_config(old).layers
    assert local.rope == RopeConfig(1e4)
    assert whole.rope == RopeConfig(1e6, "linear", factor=8.0)


def test_constants_that_gemma_configs_leave_out() -> None:
    config = {key: value for key, value in saved("gemma3").items() if value is not None}
    for key in ("head_dim", "query_pre_attn_scalar", "hidden_activation", "tie_word_embeddings"):
        del config[key]
    model = read_config(config)
    assert (model.head_dim, model.attention_scale) == (256, 1 / 16)
    assert (model.activation, model.tie_word_embeddings) == ("gelu_tanh", True)


def test_smollm3_rotates_three_of_four_layers() -> None:
    model = read_config(saved("smollm3"))
    assert [layer.rope.kind for layer in model.layers] == ["yarn"] * 3 + ["linear"]
    assert model == read_config({**saved("smollm3"), "no_rope_layers": None})
    last = read_config({**saved("smollm3"), "no_rope_layers": [0, 0, 0, 1]})
    assert [layer.rope.kind for layer in last.layers] == ["linear"] * 3 + ["yarn"]


def test_which_layers_are_recurrent() -> None:
    def recurrent(name: str, **changes: Any) -> list[int]:
        model = read_config({**saved(name), **changes})
        assert model.recurrent is not None
        return sorted(model.recurrent.layers)

    assert recurrent("qwen3.5") == [0, 2, 4]
    assert recurrent("qwen3.5", layer_types=None) == [0, 1, 2, 4]  # every fourth layer
    assert recurrent("qwen3-next", layer_types=None, full_attention_interval=2) == [0, 2]
    with pytest.raises(CheckpointError, match="layer_types has 1 entries for 5 layers"):
        recurrent("qwen3.5", layer_types=["full_attention"])
    with pytest.raises(CheckpointError, match="linear_num_value_heads=3 is not a multiple"):
        recurrent("qwen3.5", linear_num_value_heads=3)


def test_which_layers_have_experts() -> None:
    def dense_layers(**changes: Any) -> list[int]:
        changes |= {"num_hidden_layers": 6}
        experts = read_config({**saved("qwen3-moe"), **changes}).experts
        assert experts is not None
        return sorted(experts.dense_layers)

    assert dense_layers() == []
    assert dense_layers(mlp_only_layers=[2, 5]) == [2, 5]
    assert dense_layers(decoder_sparse_step=2) == [0, 2, 4]
    assert dense_layers(decoder_sparse_step=3, mlp_only_layers=[2]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "relu"}, "'relu'"),
        ("qwen2-window", {"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "su"}}, "'su'"),
        ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "'yarn'"),
        ("phi3", {"partial_rotary_factor": 0.75, "rope_parameters": None}, "0.75"),
        ("qwen2", {"is_causal": False}, "is_causal=False"),  # embedding models
        ("gemma3", {"is_causal": False}, "is_causal=False"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_parameters": {"full_attention": YARN}}, "by layer type .full_attention."),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta",
        ),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3.5", {"layer_types": ["sliding_attention"] * 5}, "sliding_attention"),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "experts are only supported with 'silu'"),
        (
            "qwen3-moe",
            {"hidden_act": "gelu_pytorch_tanh"},
            "experts are only supported with 'silu'",
        ),
    ],
)
def test_what_would_change_the_numbers_is_refused(
    name: str, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read_config({**saved(name), **changes})


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama", "hidden_size"),
        ("mixtral", "num_local_experts"),
        ("mixtral", "num_experts_per_tok"),
        ("qwen3-moe", "moe_intermediate_size"),
        ("qwen3-moe", "num_local_experts"),
        ("phi3", "rms_norm_eps"),
        ("qwen3.5-moe", "shared_expert_intermediate_size"),
    ],
)
def test_a_missing_field_is_named(name: str, field: str) -> None:
    config = saved(name)
    del config[field]
    with pytest.raises(CheckpointError, match=f"'{field}'"):
        read_config(config)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "9 .num_experts_per_tok. of 4 experts"),
        ("qwen3-moe", {"num_experts_per_tok": -1}, "num_experts_per_tok must be .* got -1"),
        ("qwen3", {"rope_scaling": YARN}, "both rope_parameters and rope_scaling"),
        ("gemma3", {"rope_parameters": YARN}, "keyed by layer type, got .'factor'"),
        ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers must be .* got '3'"),
        (
            "qwen3-moe",
            {"decoder_sparse_step": "2"},
            "config.json has an invalid value",
        ),
    ],
)
def test_what_makes_no_sense_is_named(name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_config({**saved(name), **changes})


@pytest.mark.parametrize("factor", ["2", None, True])
def test_a_factor_is_a_number(factor: object) -> None:
    parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}
    with pytest.raises((CheckpointError, ConfigError), match="factor"):
        read_config({**saved("llama"), "rope_parameters": parameters})


def test_what_a_config_leaves_out_has_the_default_of_its_class() -> None:
    def without(name: str, *fields: str) -> ModelConfig:
        config = as_transformers_4(saved(name))
        return read_config({key: value for key, value in config.items() if key not in fields})

    assert without("mistral", "sliding_window").layers[0].window == 4096
    assert without("mixtral", "sliding_window").layers[0].window is None
    assert without("mixtral", "rope_theta").layers[0].rope.theta == 1e6
    assert without("qwen3", "head_dim").head_dim == 128
    assert without("qwen2-window", "sliding_window").layers[1].window == 4096
    assert without("qwen2-window", "max_window_layers").layers[1].window is None
    scaling = {**LLAMA3_ROPE, "original_max_position_embeddings": None}
    llama = read_config({**saved("llama"), "rope_parameters": scaling})
    assert llama.layers[0].rope.original_max_position == 512


@pytest.mark.parametrize("rope", [{**YARN, "rope_theta": 1e4}, LLAMA3_ROPE], ids=["yarn", "llama3"])
def test_where_the_trained_length_stands(rope: dict[str, Any]) -> None:
    """The field may be beside the parameters or among them; transformers prefers the former."""

    def trained(top: float | None, **changes: float) -> int:
        parameters = {**rope, "original_max_position_embeddings": None, **changes}
        changed = {"rope_parameters": parameters, "original_max_position_embeddings": top}
        return read_config({**saved("llama"), **changed}).layers[0].rope.original_max_position

    assert trained(None, original_max_position_embeddings=64.0) == 64
    assert trained(32) == 32
    assert trained(32, original_max_position_embeddings=64) == 32


def test_what_gemma_configs_repeat_or_leave_null() -> None:
    """Read an activation under another family's field, and layer types without parameters."""
    want = read_config(saved("gemma3"))
    assert read_config({**saved("gemma3"), "hidden_act": "silu"}) == want
    ropes = {**saved("gemma3")["rope_parameters"], "sliding_attention": None}
    assert read_config({**saved("gemma3"), "rope_parameters": ropes}) == want


@pytest.mark.parametrize("name", ["llama", "mistral", "phi3", "qwen3"])
def test_other_families_have_no_hidden_activation(name: str) -> None:
    """transformers reads this field only for Gemma; other families default to silu."""
    config = {**saved(name), "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}
    assert read_config(config).activation == "silu"


def test_gemma_is_not_run_in_float16_unasked() -> None:
    assert read_config({**saved("gemma3"), "dtype": "float16"}).dtype == "bfloat16"
    assert read_config({**saved("gemma3"), "dtype": "float32"}).dtype == "float32"


def test_layer_types_of_another_length_are_refused() -> None:
    with pytest.raises(CheckpointError, match="3 entries for 2 layers"):
        read_config({**saved("gemma3"), "layer_types": ["full_attention"] * 3})
