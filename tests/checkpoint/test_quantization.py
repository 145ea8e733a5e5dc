"""Read `quantization_config`; unsupported settings raise before any weight is read."""

from __future__ import annotations

from typing import Any

import pytest

from nanovllm.checkpoint.quantization import (
    METHODS,
    ROUND_TO_FP8,
    choose_quantization,
    read_quantization,
)
from nanovllm.checkpoint.quantized import integers
from nanovllm.checkpoint.quantized.fp8 import Fp8
from nanovllm.checkpoint.quantized.integers import Integers
from nanovllm.checkpoint.quantized.weight_format import Quantization
from nanovllm.config import QUANTIZATION_METHODS
from nanovllm.errors import CheckpointError, ConfigError, UnsupportedQuantisationError

BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
WHOLE = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}
BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(
    layout: str = "float-quantized",
    weights: dict[str, Any] = FLOATS,
    group: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    whole = {"targets": ["Linear"], "weights": weights, "input_activations": None, **(group or {})}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": whole},
        "ignore": ["lm_head"],
        **changes,
    }


READ: list[tuple[dict[str, Any], Quantization]] = [
    (
        {**BLOCK, "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]},
        Quantization("fp8", Fp8((128, 128)), ignored=("lm_head",)),
    ),
    ({"quant_method": "fp8"}, Quantization("fp8", Fp8())),
    (
        compressed(group={"input_activations": BY_TOKEN}),
        Quantization("compressed-tensors", Fp8(), ignored=("lm_head",)),
    ),
    (
        compressed("naive-quantized"),
        Quantization("compressed-tensors", Fp8(), ignored=("lm_head",)),
    ),
    (
        compressed(weights={**FLOATS, "strategy": "block", "block_structure": [128, 64]}),
        Quantization("compressed-tensors", Fp8((128, 64)), ignored=("lm_head",)),
    ),
    (
        compressed("pack-quantized", {**WHOLE, "actorder": "group"}, ignore=["re:.*gate$"]),
        Quantization(
            "compressed-tensors",
            Integers(integers.COMPRESSED, 4, 64, is_symmetric=False, desc_act=True),
            ignored=("re:.*gate$",),
        ),
    ),
    (
        {**AWQ, "modules_to_not_convert": None},
        Quantization("awq", Integers(integers.AWQ, 4, 128, is_symmetric=False)),
    ),
    (
        GPTQ,
        Quantization("gptq", Integers(integers.GPTQ, 4, 32, False, desc_act=True, zero_offset=1)),
    ),
    (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        Quantization("gptq", Integers(integers.GPTQ, 8, -1)),
    ),
]


@pytest.mark.parametrize(("stored", "expected"), READ)
def test_what_is_read(stored: dict[str, Any], expected: Quantization) -> None:
    assert read_quantization(stored) == expected


REFUSED: list[tuple[Any, str]] = [
    ({"bits": 4}, "quant_method None"),
    ([4], "a value that is not an object"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
    ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt'"),
    ({"quant_method": ["awq"]}, r"quant_method \['awq'\]"),
    (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
    (compressed("mxfp4-pack-quantized"), "format 'mxfp4-pack-quantized'"),
    (compressed("int-quantized"), "format 'int-quantized'"),
    (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (compressed(config_groups={"a": {}, "b": {}}), "config_groups with other than one group"),
    (compressed(config_groups={"a": {}}), "targets None"),
    (compressed(group={"targets": ["re:.*mlp.*"]}), "targets"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config"),
    (compressed(group={"output_activations": BY_TOKEN}), "output_activations"),
    (compressed(group={"input_activations": {**BY_TOKEN, "dynamic": False}}), "input_activations"),
    (compressed(group={"input_activations": {**BY_TOKEN, "type": "int"}}), "input_activations"),
    (compressed("pack-quantized", WHOLE, {"input_activations": BY_TOKEN}), "input_activations"),
    (compressed(weights={**FLOATS, "num_bits": 4}), "num_bits 4"),
    (compressed(weights={**FLOATS, "strategy": "token"}), "strategy 'token'"),
    (compressed(weights={**FLOATS, "strategy": "block"}), "KeyError\\('block_structure'"),
    (compressed("pack-quantized", {**WHOLE, "num_bits": 3}), "num_bits 3"),
    (compressed("pack-quantized", {**WHOLE, "group_size": 5}), "group_size 5"),
    (compressed("pack-quantized", {**WHOLE, "actorder": "new"}), "actorder 'new'"),
    (compressed(ignore="lm_head"), "'lm_head' in place of a list"),
    (compressed(ignore=["re:("]), "missing \\), unterminated"),
    ({**BLOCK, "activation_scheme": "static"}, "activation_scheme 'static'"),
    ({**BLOCK, "fmt": "e5m2"}, "fmt 'e5m2'"),
    ({**BLOCK, "weight_block_size": [128]}, "not enough values to unpack"),
    ({**BLOCK, "weight_block_size": [0, 128]}, r"blocks of \[0, 128\]"),
    ({**AWQ, "bits": 8}, "bits 8"),
    ({**AWQ, "version": "gemv"}, "version 'gemv'"),
    ({**AWQ, "zero_point": False}, "zero_point False"),
    ({**AWQ, "group_size": "128"}, "group_size '128'"),
    ({**GPTQ, "bits": 3}, "bits 3"),
    ({**GPTQ, "bits": None}, "bits None"),
    ({**GPTQ, "sym": 1}, "sym 1"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format True"),
    ({**GPTQ, "dynamic": {"-:.*": {}}}, "dynamic"),
    ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype 'int8'"),
]


@pytest.mark.parametrize(("stored", "match"), REFUSED)
def test_what_is_refused(stored: Any, match: str) -> None:
    with pytest.raises(UnsupportedQuantisationError, match=f"quantization_config.*{match}") as e:
        read_quantization(stored)
    assert isinstance(e.value, ConfigError)
    assert isinstance(e.value, CheckpointError)


def test_ignored_modules() -> None:
    ignored = "lm_head", r"re:.*mlp\.gate$"
    exact = Quantization("compressed-tensors", Fp8(), ignored)
    assert exact.ignores("lm_head")
    assert exact.ignores("model.layers.3.mlp.gate")
    assert not exact.ignores("model.lm_head")
    assert not exact.ignores("model.layers.3.mlp.gate_proj")
    parts = Quantization("awq", Fp8(), ignored=("mlp.gate", "layers.1", "lm_head"))
    for module in ("model.layers.0.mlp.gate", "model.layers.1.mlp.up_proj", "lm_head"):
        assert parts.ignores(module)
    for module in ("model.layers.0.mlp.gate_proj", "model.layers.10.mlp.up_proj"):
        assert not parts.ignores(module)


def test_the_option_must_match_the_checkpoint() -> None:
    assert tuple(METHODS) == QUANTIZATION_METHODS
    assert choose_quantization(None, None) is None
    assert choose_quantization(None, {}) is None
    assert choose_quantization("fp8", None) == ROUND_TO_FP8
    assert choose_quantization("awq", AWQ) == choose_quantization(None, AWQ)
    assert choose_quantization("fp8", BLOCK) == read_quantization(BLOCK)
    for asked, stored in (("fp8", AWQ), ("awq", GPTQ), ("fp8", compressed())):
        with pytest.raises(
            ConfigError, match=f"'{asked}'.*is quantized by {stored['quant_method']}"
        ):
            choose_quantization(asked, stored)
    with pytest.raises(ConfigError, match="'awq': this checkpoint has no quantized weights"):
        choose_quantization("awq", None)
