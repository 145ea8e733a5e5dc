"""Which models get a persistent step, and that packing one moves their weights; on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from benchmarks.models import model_path
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.kernels.cuda import persistent_pack
from nanovllm.kernels.cuda.ops import CudaLinear, TritonOps
from nanovllm.kernels.cuda.persistent_shape import ExpertsShape, StepShape
from nanovllm.kernels.cuda.step_tensors import StackedCodes
from nanovllm.kernels.cuda.stored_linear import StoredLinear, pack_stored
from nanovllm.kernels.ops import DecoderWeights, GatedWeights, LayerWeights, PackedStep
from nanovllm.kernels.stored_weights import StoredWeight
from nanovllm.layers.build import Build
from nanovllm.models.decoder import DecoderModel
from nanovllm.models.registry import build_model, read_config
from nanovllm.platforms.cpu import CpuPlatform
from nanovllm.worker.loader import fill_dummy_weights
from tests.kernels.cuda.random_steps import make_fp8, make_int4

SIZES = {
    "vocab_size": 200,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


class NotingOps(TritonOps):
    """Keeps what a step is to be packed from."""

    def __init__(self) -> None:
        self.weights: DecoderWeights | None = None

    def pack_step(self, weights: DecoderWeights) -> PackedStep | None:
        self.weights = weights
        return None


def packed_model(
    name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> tuple[DecoderModel, NotingOps]:
    config = read_config({**json.loads(Path(model_path(name)).read_text()), **SIZES, **changes})
    ops = NotingOps()
    model = build_model(config, 64, Build(torch.device("cpu"), dtype, SdpaAttention(32), ops))
    fill_dummy_weights(model, CpuPlatform(), 0)
    return model, ops


@pytest.fixture(autouse=True)
def _any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a Hopper GPU with room."""
    monkeypatch.setattr(persistent_pack, "device_problem", lambda device: None)
    monkeypatch.setattr(persistent_pack, "_lack_of_room", lambda weights: None)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("qwen3-0.6b", {}, None),
        ("llama-3.1-8b", {}, None),
        ("qwen3-0.6b", {"architectures": ["Qwen2ForCausalLM"]}, None),  # with biases
        ("qwen3-0.6b", {"architectures": ["MistralForCausalLM"], "sliding_window": 99}, None),
        ("llama-3.1-8b", {"attention_bias": True}, "biases"),
        ("llama-3.1-8b", {"mlp_bias": True}, "biases"),
        (
            "qwen3-0.6b",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "layers differ",
        ),
        ("qwen3-0.6b", {"num_key_value_heads": 4}, "a kv head for every 1"),
        ("qwen3-0.6b", {"hidden_size": 200}, "widths"),
        ("qwen3-0.6b", {"dtype": torch.float32}, "not plain matrices"),
        ("qwen3-0.6b", {"dtype": torch.float16}, "not bfloat16"),
    ],
    ids=str,
)
def test_who_is_served(name: str, changes: dict[str, Any], problem: str | None) -> None:
    model, ops = packed_model(name, **changes)
    model.pack_step()
    assert ops.weights is not None
    found = persistent_pack._problem(ops.weights)
    assert found is None if problem is None else problem in str(found)


def test_norms_with_more_digits_are_not_served() -> None:
    model, ops = packed_model("qwen3-0.6b")
    model.model.norm.weight.fill_(1.001)
    model.pack_step()
    assert ops.weights is not None
    assert "digits" in str(persistent_pack._problem(ops.weights))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"moe_intermediate_size": 72}, "experts of 72"),
        ({"num_experts": 300}, "of 300 experts"),
        ({"mlp_only_layers": [1]}, "some have none"),
    ],
    ids=str,
)
def test_which_experts_are_served(changes: dict[str, Any], problem: str | None) -> None:
    sizes = {"moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2}
    model, ops = packed_model("qwen3-30b-a3b", **{**sizes, **changes})
    model.pack_step()
    assert ops.weights is not None
    found = persistent_pack._problem(ops.weights)
    assert found is None if problem is None else problem in str(found)
    if problem is None:
        experts = StepShape(256, 4, 2, 128, 256, 200, 16, ExpertsShape(6, 2, 128, True))
        assert persistent_pack._shape(ops.weights) == experts
        tensors = persistent_pack.pack_tensors(ops.weights)
        assert isinstance(tensors.down, Tensor)
        assert tensors.down.shape == (3, 6, 256, 128)
        assert tensors.router is not None
        assert tensors.router.shape == (3, 6, 256)


def test_weights_move_and_are_not_copied() -> None:
    model, _ = packed_model("qwen3-0.6b")
    linears: list[Any] = [layer.self_attn.qkv_proj.packed for layer in model.model.layers]
    before = [linear.weight.clone() for linear in linears]
    assert all(isinstance(linear, CudaLinear) for linear in linears)
    with torch.inference_mode():
        stacked = persistent_pack.move_together([linear.weight for linear in linears])
    assert isinstance(stacked, Tensor)
    for i, (linear, weight) in enumerate(zip(linears, before, strict=True)):
        assert torch.equal(linear.weight, weight)
        assert linear.weight.data_ptr() == stacked[i].data_ptr()


@pytest.mark.parametrize("make", [make_fp8, make_int4])
def test_codes_move_and_are_not_copied(make: Callable[[Tensor], StoredWeight]) -> None:
    model, ops = packed_model("qwen3-0.6b")
    model.pack_step()
    assert ops.weights is not None
    weights = replace(ops.weights, layers=[with_codes(layer, make) for layer in ops.weights.layers])
    assert persistent_pack._problem(weights) is None
    stored: list[Any] = [layer.o for layer in weights.layers]
    before = [linear.weight.widen(torch.float32) for linear in stored]
    stacked = persistent_pack.pack_tensors(weights).o
    assert isinstance(stacked, StackedCodes)
    for i, (linear, values) in enumerate(zip(stored, before, strict=True)):
        assert linear.weight.words.data_ptr() == stacked.words[i].data_ptr()
        assert torch.equal(linear.weight.widen(torch.float32), values)


def test_codes_beside_plain_weights_are_not_served() -> None:
    model, ops = packed_model("qwen3-0.6b")
    model.pack_step()
    assert ops.weights is not None
    layers = ops.weights.layers
    mixed = [with_codes(layers[0], make_fp8), *layers[1:]]
    assert "differ in bits" in str(persistent_pack._problem(replace(ops.weights, layers=mixed)))
    coarse = [with_codes(layer, lambda w: make_int4(w, group=32)) for layer in layers]
    assert "groups" in str(persistent_pack._problem(replace(ops.weights, layers=coarse)))


def with_codes(layer: LayerWeights, make: Callable[[Tensor], StoredWeight]) -> Any:
    def stored(linear: Any) -> StoredLinear:
        return pack_stored(TritonOps(), make(linear.weight), linear.bias, linear.activation)

    assert isinstance(layer.mlp, GatedWeights)
    mlp = GatedWeights(stored(layer.mlp.gate_up), stored(layer.mlp.down))
    return replace(layer, qkv=stored(layer.qkv), o=stored(layer.o), mlp=mlp)


def test_other_releases_of_triton_run_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ops = packed_model("qwen3-0.6b")
    model.pack_step()
    assert ops.weights is not None
    monkeypatch.setattr("triton.__version__", "3.9.0")
    assert TritonOps().pack_step(ops.weights) is None
