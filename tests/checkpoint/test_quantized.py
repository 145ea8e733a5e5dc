"""Every format of quantized weights is dequantized exactly as its formula defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.checkpoint import stored_tensors as weights
from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.list_tensors import list_tensors, list_weights
from nanovllm.checkpoint.quantization import METHODS, ROUND_TO_FP8, choose_quantization
from nanovllm.checkpoint.quantized.checks import check_matrix
from nanovllm.checkpoint.quantized.combine import is_quantized_to_fp8
from nanovllm.checkpoint.quantized.weight import quantized_tensor, read_part
from nanovllm.checkpoint.quantized.weight_format import Parts, Quantization
from nanovllm.checkpoint.stored_tensors import StoredTensor
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.ops.fp8 import quantize_rows
from nanovllm.ops.quantized_weight import QuantizedPiece
from tests.checkpoint.tiny_quantized import (
    Kind,
    awq_kind,
    compressed_config,
    float_kind,
    fp8_block,
    fp8_block_kind,
    gptq_kind,
    packed_kind,
)

BLOCK_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 128]}
KINDS: dict[str, tuple[Kind, tuple[int, int]]] = {
    "fp8-block": (fp8_block_kind(128, 128), (256, 384)),
    "fp8-block-cut-short": (fp8_block_kind(128, 128), (200, 300)),
    "fp8-block-bf16": (fp8_block_kind(128, 128, dtype=torch.bfloat16), (128, 130)),
    "fp8-block-compressed": (
        Kind(
            fp8_block,
            compressed_config("float-quantized", BLOCK_WEIGHTS),
            {"block": (64, 128), "name": "weight_scale"},
        ),
        (130, 256),
    ),
    "fp8-channel": (float_kind("channel", "channel"), (40, 24)),
    "fp8-flat": (float_kind("channel", "flat"), (40, 24)),
    "fp8-tensor": (float_kind("tensor", "tensor"), (40, 24)),
    "fp8-scalar": (float_kind("tensor", "scalar"), (40, 24)),
    "packed-symmetric": (packed_kind(4, 128, True, False), (24, 256)),
    "packed-zeros": (packed_kind(4, 32, False, False), (20, 96)),
    "packed-byte-zeros": (packed_kind(4, 32, False, False, packs_zeros=False), (20, 96)),
    "packed-shuffled": (packed_kind(4, 64, False, True), (24, 128)),
    "packed-channel": (packed_kind(4, -1, True, False), (24, 44)),
    "packed-8-bits": (packed_kind(8, 32, False, False), (18, 64)),
    **{f"awq-{group}": (awq_kind(group), (40, 256)) for group in (32, 64, 128, -1)},
    **{f"gptq-{group}": (gptq_kind(4, group, True, False), (40, 256)) for group in (32, 64, -1)},
    "gptq-zeros": (gptq_kind(4, 128, False, False), (40, 256)),
    "gptq-without-g-idx": (gptq_kind(4, 32, False, False, has_groups=False), (40, 64)),
    "gptq-shuffled": (gptq_kind(4, 32, True, True), (40, 256)),
    "gptq-shuffled-zeros": (gptq_kind(4, 64, False, True), (40, 256)),
    "gptq-v2": (gptq_kind(4, 32, False, False, offset=0), (40, 64)),
    "gptq-8-bits": (gptq_kind(8, 32, False, True), (36, 128)),
    "gptqmodel-zeros": (gptq_kind(4, 32, False, False, borrows=True), (40, 64)),
    "gptqmodel-8-bits": (gptq_kind(8, 32, False, False, borrows=True), (36, 64)),
}
PARTS = [(slice(None), slice(None)), (slice(3, 17), slice(None)), (slice(8, 19), slice(9, 23))]


def list_stored(
    folder: Path, parts: dict[str, Tensor], config: Any, expected: tuple[str, ...] = ()
) -> dict[str, StoredTensor]:
    save_file(parts, folder / "m.safetensors")
    quantization = choose_quantization(None, config)
    assert quantization is not None
    file = folder / "m.safetensors"
    checkpoint = Checkpoint(folder, {}, {}, (file,), quantization)
    tensors = list_weights(checkpoint, expected)
    return {tensor.name: tensor for tensor in tensors}


def named(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"a.{name}": tensor for name, tensor in parts.items()}


def read(tensor: StoredTensor, *index: slice) -> Tensor:
    return torch.cat([piece.clone() for piece in tensor.read(index)])


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_values_follow_the_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, edges: bool
) -> None:
    kind, shape = KINDS[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    made = kind(weight, seed=3, edges=edges)
    if not edges:  # sanity check: the formulas give the rounded weights
        assert (made.values - weight).abs().max() < weight.abs().max() / (3 if "int" in name else 2)
    tensors = list_stored(tmp_path, named(made.parts), kind.config)
    assert tensors.keys() == {"a.weight"}
    assert tensors["a.weight"].shape == shape
    for piece_bytes in (weights.PIECE_BYTES, 4 * shape[1] * 9):
        monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
        for index in PARTS:
            assert_same(read(tensors["a.weight"], *index), made.values[index])


@dataclass(frozen=True)
class Bytes:
    """Another `WeightFormat`: unsigned bytes with a scale per output."""

    parts = ("bytes", "scale")
    layout = None

    def open(self, parts: Parts) -> list[StoredTensor]:
        values, scale = parts["bytes"], parts["scale"]

        def read_rows(outputs: slice, inputs: slice) -> QuantizedPiece:
            return QuantizedPiece(
                read_part(values, outputs, inputs), read_part(scale, outputs), zeros=128
            )

        shape = check_matrix(values, "uint8")
        return [quantized_tensor(values, shape, (1, 1), self.layout, read_rows)]


def test_a_format_is_a_class_and_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "bytes", lambda stored: Quantization("bytes", Bytes()))
    config, scale = {"quant_method": "bytes"}, torch.rand(24, 1)
    values = torch.randint(256, (24, 40), dtype=torch.uint8)
    tensors = list_stored(tmp_path, named({"bytes": values, "scale": scale}), config)
    for index in PARTS:
        assert_same(read(tensors["a.weight"], *index), ((values.float() - 128) * scale)[index])
    with pytest.raises(CheckpointError, match="a is quantized and has no tensor scale"):
        list_stored(tmp_path, named({"bytes": values}), config)


def test_every_code_of_fp8(tmp_path: Path) -> None:
    patterns = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.tensor([[0.375]])
    parts = {"a.weight": patterns.view(torch.float8_e4m3fn), "a.weight_scale_inv": scale}
    kind = fp8_block_kind(16, 16)
    got = read(list_stored(tmp_path, parts, kind.config)["a.weight"])
    sign, exponent, fraction = patterns.int() >> 7, patterns.int() >> 3 & 15, patterns.int() & 7
    size = torch.where(
        exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7)
    )
    size[(exponent == 15) & (fraction == 7)] = torch.nan
    assert_same(got, size * (1 - 2 * sign) * 0.375)


def test_parts_in_pytorch_files(tmp_path: Path) -> None:
    kind, shape = KINDS["gptq-shuffled-zeros"]
    made = kind(torch.randn(shape))
    torch.save(named(made.parts), tmp_path / "m.bin")
    quantization = choose_quantization(None, kind.config)
    assert quantization is not None
    checkpoint = Checkpoint(tmp_path, {}, {}, (tmp_path / "m.bin",), quantization)
    [tensor] = list_weights(checkpoint)
    assert_same(read(tensor), made.values)


def test_what_more_is_stored_than_config_json_says(tmp_path: Path) -> None:
    """Zero points of symmetric weights are used; unset groups are consecutive."""
    asymmetric, shape = KINDS["packed-zeros"]
    symmetric = packed_kind(4, 32, True, False)
    made = asymmetric(torch.randn(shape))
    unset = torch.full((shape[1],), -1, dtype=torch.int32)
    parts = named(made.parts) | {"a.weight_g_idx": unset}
    assert_same(read(list_stored(tmp_path, parts, symmetric.config)["a.weight"]), made.values)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_symmetric_gptq_are_the_middle(tmp_path: Path, bits: int) -> None:
    """Some files declare version 1 but store zero points as in version 2: vLLM PR 38966."""
    second = gptq_kind(bits, 32, True, False, offset=0)
    made = second(torch.randn(36, 64))
    config = {**second.config, "checkpoint_format": "gptq"}
    for index in PARTS:
        tensor = list_stored(tmp_path, named(made.parts), config)["a.weight"]
        assert_same(read(tensor, *index), made.values[index])
    # For asymmetric weights this cannot be detected, so the declared format is used.
    tensor = list_stored(tmp_path, named(made.parts), {**config, "sym": False})["a.weight"]
    assert not torch.equal(read(tensor), made.values)


def test_what_is_not_quantized_stays(tmp_path: Path) -> None:
    kind, _ = KINDS["fp8-block"]
    plain = {
        "norm.weight": torch.ones(4),
        "head.weight": torch.randn(8, 4),
        "b.bias": torch.ones(4),
    }
    made = kind(torch.randn(128, 128))
    tensors = list_stored(tmp_path, named(made.parts) | plain, kind.config)
    assert tensors.keys() == {"a.weight", *plain}
    for name, tensor in plain.items():
        assert_same(read(tensors[name]), tensor)


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda parts: parts.pop(name)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda parts: parts.update({name: change(parts[name])})


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("fp8-block", without("weight_scale_inv"), "a is quantized and has no tensor weight_scale"),
        ("fp8-block", replaced("weight_scale_inv", lambda t: t[:1].clone()), "shape .* expected"),
        ("fp8-block", replaced("weight", lambda t: t.int()), "of int32, expected .* of float8"),
        ("fp8-block", replaced("weight", lambda t: t[0].clone()), "shape .* expected"),
        ("fp8-channel", replaced("weight_scale", lambda t: t[:3].clone()), "shape .* expected"),
        ("packed-zeros", without("weight_zero_point"), "has no tensor weight_zero_point"),
        ("packed-shuffled", without("weight_g_idx"), "has no tensor weight_g_idx"),
        ("packed-shuffled", replaced("weight_g_idx", lambda t: t + 1), "group indices below 2"),
        ("packed-zeros", replaced("weight_shape", lambda t: t + 8), "shape .* expected"),
        ("awq-32", without("scales"), "a is quantized and has no tensor scales"),
        ("awq-32", replaced("qzeros", lambda t: t[:-1].clone()), "shape .* expected"),
        ("gptq-shuffled", without("g_idx"), "has no tensor g_idx"),
        ("gptq-shuffled", replaced("g_idx", lambda t: t - 1), "group indices below 8"),
        ("gptq-32", replaced("scales", lambda t: t.int()), "of int32, expected"),
    ],
)
def test_odd_parts_are_named(
    tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], object], match: str
) -> None:
    kind, shape = KINDS[name]
    parts = kind(torch.randn(shape)).parts
    change(parts)
    with pytest.raises(CheckpointError, match=match):
        read(list_stored(tmp_path, named(parts), kind.config)["a.weight"])


def test_biases_of_zeros_that_nobody_expects_are_dropped(tmp_path: Path) -> None:
    kind, shape = KINDS["gptq-32"]
    parts = kind(torch.randn(shape)).parts
    biases = {f"{name}.bias": torch.zeros(shape[0]) for name in "abc"}
    biases["c.bias"][3] = 1.0
    tensors = list_stored(tmp_path, named(parts) | biases, kind.config, ("b.bias",))
    assert tensors.keys() == {"a.weight", "b.bias", "c.bias"}


def test_quantized_tensors_need_a_quantization_config(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file(KINDS["awq-32"][0](torch.randn(40, 256)).parts, file)
    for quantization in (None, ROUND_TO_FP8):
        checkpoint = Checkpoint(tmp_path, {}, {}, (file,), quantization)
        with pytest.raises(UnsupportedModelError, match="is stored as I32"):
            list_tensors(checkpoint)


def test_quantizing_to_fp8() -> None:
    values = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    values *= torch.tensor([[1.0], [0.0], [1e-37], [8e37], [1e-44], [-5.0]])
    stored = quantize_rows(values)
    got = stored.values.float() * stored.scales
    for row, rounded in zip(values, got, strict=True):
        scale = max(row.abs().max().item() / 448, 2.0**-126)
        quantized = (row / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        torch.testing.assert_close(rounded, quantized.float() * scale, rtol=3e-7, atol=1e-44)
    assert got.isfinite().all()
    assert torch.equal(got[1], values[1])
    kept = [0, 2, 3, 5]  # the largest value of each row is exact
    torch.testing.assert_close(got[kept].abs().amax(1), values[kept].abs().amax(1))
    assert (got[0] - values[0]).abs().max() < values[0].abs().max() / 16


@pytest.mark.parametrize(
    ("name", "is_quantized"),
    [
        ("self_attn.q_proj", True),
        ("mlp.gate_proj", True),
        ("mlp.shared_expert.gate_proj", True),
        ("linear_attn.in_proj_qkv", True),
        ("linear_attn.in_proj_qkvz", True),
        ("mlp.gate", False),
        ("mlp.shared_expert_gate", False),
        ("linear_attn.in_proj_a", False),
        ("linear_attn.in_proj_b", False),
        ("linear_attn.in_proj_ba", False),
    ],
)
def test_which_projections_are_quantized_to_fp8(name: str, is_quantized: bool) -> None:
    assert is_quantized_to_fp8(f"model.layers.3.{name}.weight", 5) == is_quantized
