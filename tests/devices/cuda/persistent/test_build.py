"""Which models the persistent step supports, and that `build` moves their weights; on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from benchmarks.models import model_path
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.devices.cuda import persistent
from nanovllm.devices.cuda.ops import TritonOps, pack_quantized
from nanovllm.devices.cuda.persistent import build
from nanovllm.devices.cuda.persistent import packed_weights as weights
from nanovllm.devices.cuda.persistent.persistent_step import StackedQuantized
from nanovllm.devices.cuda.persistent.sizes import ExpertsShape, StepShape
from nanovllm.layers.all_heads_norm import AllHeadsNorm
from nanovllm.layers.build import BuildContext
from nanovllm.models.decoder import DecoderModel
from nanovllm.models.registry import build_model, read_config
from nanovllm.ops.fp8 import FP8
from nanovllm.ops.quantized_weight import QuantizedWeight
from nanovllm.worker.dummy_weights import fill_dummy_weights
from nanovllm.worker.kv_cache import Kind, KVCacheSpec, LayerGroups, Place
from tests.devices import cpu_device
from tests.devices.cuda.persistent.random_steps import make_fp8, make_int4

SIZES = {
    "vocab_size": 200,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}

SCALED_QUERIES = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
LAYERS = LayerGroups((Kind(None),), (Place(0, 0), Place(0, 1), Place(0, 2)), 3)
CACHE = KVCacheSpec(LAYERS, 32, 2, 128, torch.bfloat16)


def loaded_model(name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> DecoderModel:
    config = read_config({**json.loads(Path(model_path(name)).read_text()), **SIZES, **changes})
    ops = TritonOps()
    model = build_model(
        config, 64, BuildContext(torch.device("cpu"), dtype, SdpaAttention(32), ops)
    )
    fill_dummy_weights(model, cpu_device(), 0)
    return model


def problem_of(model: DecoderModel) -> str | None:
    return weights.find_problem(model, weights.step_layers(model), CACHE)


@pytest.fixture(autouse=True)
def _any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the CPU as if it were a Hopper GPU."""
    monkeypatch.setattr(weights, "device_problem", lambda device: None)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("qwen3-0.6b", {}, None),
        ("llama-3.1-8b", {}, None),
        ("qwen3-0.6b", {"architectures": ["Qwen2ForCausalLM"]}, None),  # with biases
        ("qwen3-0.6b", {"architectures": ["MistralForCausalLM"], "sliding_window": 99}, None),
        ("qwen3-0.6b", {"architectures": ["GlmForCausalLM"]}, None),
        (
            "qwen3-0.6b",
            {"architectures": ["GraniteForCausalLM"], "logits_scaling": 8.0},
            "scales embeddings or logits",
        ),
        (
            "qwen3-0.6b",
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1, 0]},
            "layers differ",
        ),
        (
            "qwen3-0.6b",
            {"architectures": ["Ministral3ForCausalLM"], "rope_scaling": SCALED_QUERIES},
            "scales queries",
        ),
        *(
            ("qwen3-0.6b", {"architectures": [f"{family}ForCausalLM"]}, "neither 16-bit")
            for family in ("Gemma2", "Glm4", "Olmo2", "Olmo3")  # other orders of norms
        ),
        ("llama-3.1-8b", {"attention_bias": True}, "biases"),
        ("llama-3.1-8b", {"mlp_bias": True}, "biases"),
        ("qwen3-0.6b", {"hidden_act": "gelu_pytorch_tanh"}, "activation"),
        (
            "qwen3-0.6b",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "layers differ",
        ),
        ("qwen3-0.6b", {"num_key_value_heads": 4}, "only 1 query heads"),
        ("qwen3-0.6b", {"hidden_size": 200}, "hidden size 200"),
        ("qwen3-0.6b", {"dtype": torch.float32}, "neither 16-bit nor quantized"),
        ("qwen3-0.6b", {"dtype": torch.float16}, "not bfloat16"),
    ],
    ids=str,
)
def test_supported_models(name: str, changes: dict[str, Any], problem: str | None) -> None:
    found = problem_of(loaded_model(name, **changes))
    assert found is None if problem is None else problem in str(found)


def test_unsupported_caches(caplog: pytest.LogCaptureFixture) -> None:
    assert build(loaded_model("qwen3-0.6b"), replace(CACHE, block_size=48)) is None
    assert "cache" in warning_in(caplog)


def test_the_shape_includes_the_dtype_of_the_cache() -> None:
    model = loaded_model("qwen3-0.6b")
    layers, cache = weights.step_layers(model), replace(CACHE, dtype=FP8)
    assert weights.find_problem(model, layers, cache) is None
    assert weights.step_shape(model, layers, CACHE).cache_bits == 16
    assert weights.step_shape(model, layers, cache).cache_bits == 8


def warning_in(caplog: pytest.LogCaptureFixture) -> str:
    """Return the only warning that was logged, which must name the cost."""
    (text,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "0.66 instead of 0.45 ms" in text
    return text


def test_unsupported_models_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert build(loaded_model("qwen3-0.6b", torch.float16), CACHE) is None
    assert not caplog.text


def test_softcapping_and_norms_over_all_heads_are_not_supported() -> None:
    model = loaded_model("qwen3-0.6b")
    for layer in model.model.layers:
        layer.self_attn.spec = replace(layer.self_attn.spec, softcap=50.0)
    assert "caps attention scores" in str(problem_of(model))
    model = loaded_model("qwen3-0.6b")
    build = BuildContext(torch.device("cpu"), torch.bfloat16, SdpaAttention(32), TritonOps())
    model.model.layers[1].self_attn.qk_norm = AllHeadsNorm(model.config, build)
    assert problem_of(model) is not None


def test_norms_beyond_bfloat16_are_not_supported() -> None:
    model = loaded_model("qwen3-0.6b")
    model.model.norm.weight.fill_(1.001)
    assert "not exact in bfloat16" in str(problem_of(model))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"moe_intermediate_size": 72}, "experts of intermediate size 72"),
        ({"num_experts": 300}, "of 300 experts"),
        ({"mlp_only_layers": [1]}, "differ in their routing"),
    ],
    ids=str,
)
def test_supported_experts(changes: dict[str, Any], problem: str | None) -> None:
    sizes = {"moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2}
    model = loaded_model("qwen3-30b-a3b", **{**sizes, **changes})
    found = problem_of(model)
    assert found is None if problem is None else problem in str(found)
    if problem is None:
        layers = weights.step_layers(model)
        experts = StepShape(256, 4, 2, 128, 256, 200, 16, ExpertsShape(6, 2, 128, True))
        assert weights.step_shape(model, layers, CACHE) == experts
        tensors = weights.step_tensors(model, layers)
        assert isinstance(tensors.down, Tensor)
        assert tensors.down.shape == (3, 6, 256, 128)
        assert tensors.router is not None
        assert tensors.router.shape == (3, 6, 256)


def test_weights_move_and_are_not_copied() -> None:
    model = loaded_model("qwen3-0.6b")
    linears: list[Any] = [layer.self_attn.qkv_proj.packed for layer in model.model.layers]
    before = [linear.weight.clone() for linear in linears]
    with torch.inference_mode():
        stacked = weights.step_tensors(model, weights.step_layers(model)).qkv
    assert isinstance(stacked, Tensor)
    for i, (linear, weight) in enumerate(zip(linears, before, strict=True)):
        assert torch.equal(linear.weight, weight)
        assert linear.weight.data_ptr() == stacked[i].data_ptr()


@pytest.mark.parametrize("make", [make_fp8, make_int4])
def test_quantized_weights_move_and_are_not_copied(
    make: Callable[[Tensor], QuantizedWeight],
) -> None:
    model = loaded_model("qwen3-0.6b")
    for layer in model.model.layers:
        quantize(layer, make)
    assert problem_of(model) is None
    stored: list[Any] = [layer.self_attn.o_proj.packed for layer in model.model.layers]
    before = [linear.weight.dequantize(torch.float32) for linear in stored]
    stacked = weights.step_tensors(model, weights.step_layers(model)).o
    assert isinstance(stacked, StackedQuantized)
    for i, (linear, values) in enumerate(zip(stored, before, strict=True)):
        assert linear.weight.qweight.data_ptr() == stacked.words[i].data_ptr()
        assert torch.equal(linear.weight.dequantize(torch.float32), values)


def test_mixed_bits_are_not_supported() -> None:
    model = loaded_model("qwen3-0.6b")
    quantize(model.model.layers[0], make_fp8)
    assert "differ in bit width" in str(problem_of(model))


def test_other_group_sizes_are_not_supported() -> None:
    model = loaded_model("qwen3-0.6b")
    for layer in model.model.layers:
        quantize(layer, lambda weight: make_int4(weight, group=32))
    assert "groups" in str(problem_of(model))


def quantize(layer: Any, make: Callable[[Tensor], QuantizedWeight]) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    for module in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
        plain = module.packed
        module.packed = pack_quantized(
            TritonOps(), make(plain.weight), plain.bias, plain.activation
        )


@pytest.mark.parametrize("has_hopper", [True, False])
def test_other_releases_of_triton_run_layer_by_layer(
    has_hopper: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triton.__version__", "3.9.0")
    monkeypatch.setattr(persistent, "is_hopper", lambda model: has_hopper)
    assert build(loaded_model("qwen3-0.6b"), CACHE) is None
    if has_hopper:
        assert "Triton 3.6.x and 3.7.x, not 3.9.0" in warning_in(caplog)
    else:
        assert not caplog.text


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1"])
def test_without_memory_layers_run_one_by_one(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded_model("qwen3-0.6b")
    lacking = mock.Mock(side_effect=torch.OutOfMemoryError)
    monkeypatch.setattr("triton.__version__", release)
    monkeypatch.setattr(weights, "move_together", lacking)
    assert build(model, CACHE) is None
    assert lacking.called
    assert "not enough memory" in warning_in(caplog)
