"""Rotary embedding equals transformers: frequencies, tables, rotation, both config layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanovllm.config import RopeConfig
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.rotary_embedding import rope_frequencies, rope_table
from nanovllm.models.config_json import read_model_config, read_rope_config
from nanovllm.ops.torch_ops import rotate

HEAD_DIMS = (16, 24, 64, 128)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3-published": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3, "beta_fast": 16.0},
    "yarn-chosen": {**YARN, "attention_factor": 0.8, "beta_slow": 2.0, "truncate": False},
    "yarn-short": {**YARN, "original_max_position_embeddings": 16},
}
CASES = pytest.mark.parametrize("name", list(SCALINGS))


def hf_config(name: str, head_dim: int = 64, theta: float = 500000.0) -> LlamaConfig:
    rope = {**SCALINGS[name], "rope_theta": theta}
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_parameters=rope,
    )


def turn(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate every head of x [tokens, heads, dim] by the position of its token."""
    turns = table[positions].unsqueeze(2)
    return rotate(x, turns[:, 0], turns[:, 1])


def rope_config(name: str, theta: float = 500000.0) -> RopeConfig:
    parameters = {**SCALINGS[name], "rope_theta": theta}
    return read_rope_config({"rope_parameters": parameters, "max_position_embeddings": 2048})


def frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    return rope_frequencies(head_dim, rope, torch.zeros(1, 1)).view(-1)


@CASES
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_equal_transformers(name: str, head_dim: int, theta: float) -> None:
    config = hf_config(name, head_dim, theta)
    init = ROPE_INIT_FUNCTIONS.get(
        SCALINGS[name]["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    want, attention_scaling = init(config)
    assert rope_config(name, theta).attention_factor == pytest.approx(attention_scaling)
    got = frequencies(head_dim, rope_config(name, theta))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_llama3_scales_slow_frequencies_only() -> None:
    plain = frequencies(64, rope_config("default"))
    scaled = frequencies(64, rope_config("llama3"))
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8
    is_between = (scaled < plain) & (scaled > plain / 8)
    assert 0 < is_between.sum() < 16


def test_factors_divide_each_frequency() -> None:
    factors = [1.0 + i / 4 for i in range(32)]
    scaling = {"rope_type": "factors", "factors": factors}
    config = {"rope_theta": 500000.0, "rope_scaling": scaling, "head_dim": 64}
    rope = read_rope_config(config)
    want = frequencies(64, rope_config("default")) / torch.tensor(factors)
    assert torch.equal(frequencies(64, rope), want)


def test_factors_of_llama3_equal_llama3() -> None:
    """GGUF files store the llama3 scaling as one divisor per frequency."""
    plain = frequencies(64, rope_config("default"))
    want = frequencies(64, rope_config("llama3"))
    rope = RopeConfig(500000.0, kind="factors", factors=tuple((plain / want).tolist()))
    torch.testing.assert_close(frequencies(64, rope), want, rtol=1e-6, atol=0)


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 1, 2, 1000, 31, 2047, 5])
    q = torch.randn(7, 4, 64, generator=generator).to(dtype)
    k = torch.randn(7, 2, 64, generator=generator).to(dtype)
    reference = LlamaRotaryEmbedding(hf_config(name))
    cos, sin = reference(q, positions[None])
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    want_q, want_k = (x[0].transpose(0, 1) for x in want)

    table = rope_table(64, 2048, rope_config(name), torch.device("cpu"))
    qk = turn(torch.cat((q, k), dim=1), table, positions)
    assert qk.dtype == dtype
    tolerance = {torch.float32: 2e-4, torch.bfloat16: 3e-2}[dtype]  # float32: sin of 2047 radians
    torch.testing.assert_close(qk[:, :4], want_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(qk[:, 4:], want_k, rtol=tolerance, atol=tolerance)


def test_rotation_depends_on_distance_alone() -> None:
    table = rope_table(64, 512, RopeConfig(10000.0), torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def score(q_position: int, k_position: int) -> torch.Tensor:
        turned = [
            turn(x, table, torch.tensor([position]))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return (turned[0] * turned[1]).sum()

    for distance in (0, 1, 17, 200):
        torch.testing.assert_close(score(distance, 0), score(300, 300 - distance))
    torch.testing.assert_close(score(0, 0), (q * k).sum())


@CASES
def test_both_layouts_read_the_same(name: str) -> None:
    """transformers 4 stores the base separately; before that the kind was called `type`."""
    scaling = SCALINGS[name]
    want = rope_config(name)
    old = {"rope_theta": 500000.0, "max_position_embeddings": 2048}
    assert read_rope_config({**old, "rope_scaling": scaling}) == want
    renamed = {"type": scaling["rope_type"], **scaling}
    del renamed["rope_type"]
    assert read_rope_config({**old, "rope_scaling": renamed}) == want
    saved = hf_config(name).to_dict()
    assert "rope_parameters" in saved
    assert read_rope_config(saved) == want


@pytest.mark.parametrize("length", [1, 2048, 2049, 5000])
def test_dynamic_equals_transformers_at_the_newest_token(length: int) -> None:
    """A token is rotated as by transformers when it is generated."""
    reference = LlamaRotaryEmbedding(hf_config("dynamic"))
    cos, sin = reference(torch.zeros(1), torch.tensor([[length - 1]]))
    table = rope_table(64, 5000, rope_config("dynamic"), torch.device("cpu"))
    torch.testing.assert_close(table[length - 1, 0], cos[0, 0, :32], rtol=0, atol=2e-3)
    torch.testing.assert_close(table[length - 1, 1], sin[0, 0, :32], rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "factor", "want"),
    [("default", 1.0, 100), ("linear", 3.0, 300), ("dynamic", 2.5, 250), ("yarn", 4.0, 160)],
)
def test_scaling_makes_room_for_more_positions(kind: str, factor: float, want: int) -> None:
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 40}
    config = {**hf_config("default").to_dict(), "architectures": ["LlamaForCausalLM"]}
    config |= {"max_position_embeddings": 100, "rope_parameters": scaling}
    assert read_model_config(config).max_position_embeddings == want


def test_defaults() -> None:
    assert read_rope_config({}) == RopeConfig(theta=10000.0)
    assert read_rope_config({"rope_scaling": None, "rope_theta": 5.0}) == RopeConfig(theta=5.0)
    assert read_rope_config({"rope_parameters": {"rope_theta": 7.0}}) == RopeConfig(theta=7.0)


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", "proportional"])
def test_unknown_kinds_are_refused_by_name(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 2.0}
    configs: list[dict[str, Any]] = [
        {"rope_parameters": {**scaling, "rope_theta": 1e4}},
        {"rope_theta": 1e4, "rope_scaling": scaling},
        {"rope_theta": 1e4, "rope_scaling": {"type": kind, "factor": 2.0}},
    ]
    for config in configs:
        with pytest.raises(UnsupportedModelError, match=f"'{kind}'.*supported: default, linear"):
            read_rope_config(config)
        whole = {**hf_config("default").to_dict(), "architectures": ["LlamaForCausalLM"], **config}
        if "rope_parameters" not in config:
            del whole["rope_parameters"]
        with pytest.raises(UnsupportedModelError, match=kind):
            read_model_config(whole)


def test_partial_rotation_is_refused() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    for config in ({"rope_parameters": parameters}, {"partial_rotary_factor": 0.75}):
        with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0\.75"):
            read_rope_config(config)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        *(("llama3", field) for field in ("factor", "low_freq_factor", "high_freq_factor")),
    ],
)
def test_a_missing_parameter_is_named(name: str, field: str) -> None:
    scaling = {key: value for key, value in SCALINGS[name].items() if key != field}
    with pytest.raises(CheckpointError, match=f"'{field}'"):
        read_rope_config(
            {"rope_theta": 1e4, "rope_scaling": scaling, "max_position_embeddings": 2048}
        )
