"""The quantization of a checkpoint, read from `quantization_config`, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.checkpoint.quantized.checks import choose, read_names, unsupported
from nanovllm.checkpoint.quantized.fp8 import read_block, read_fp8
from nanovllm.checkpoint.quantized.integers import read_awq, read_gptq, read_packed
from nanovllm.checkpoint.quantized.weight_format import Quantization, RoundToFp8, WeightFormat
from nanovllm.errors import ConfigError

ROUND_TO_FP8 = Quantization("fp8", RoundToFp8())


def choose_quantization(requested: str | None, stored: object) -> Quantization | None:
    """Return the quantization in `quantization_config`, or the one that the user requested."""
    quantization = read_quantization(stored)
    if requested is None or (quantization is not None and quantization.method == requested):
        return quantization
    if quantization is None and requested == "fp8":
        return ROUND_TO_FP8
    if quantization is None:
        what = "has no quantized weights; only quantization='fp8' quantizes them while it loads"
    else:
        what = f"is quantized by {quantization.method}"
    raise ConfigError(f"quantization={requested!r}: this checkpoint {what}; leave the option out")


def read_quantization(stored: object) -> Quantization | None:
    """Read `quantization_config`; unsupported values raise an error that names them."""
    if stored is None or stored == {}:
        return None
    if not isinstance(stored, Mapping):
        raise unsupported("a value that is not an object")
    read = METHODS[choose(stored, "quant_method", None, *METHODS)]
    try:
        return read(stored)
    except (TypeError, ValueError, KeyError, AttributeError, re.error) as error:
        raise unsupported(f"a missing value or wrong type ({error!r:.120})") from error


def _read_compressed(stored: Mapping[str, Any]) -> Quantization:
    groups = list(stored["config_groups"].values())
    if len(groups) != 1:
        raise unsupported("config_groups with other than one group")
    group = groups[0]
    choose(group, "targets", None, ["Linear"])
    choose(group, "output_activations", {}, {})
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if stored.get(name) and stored[name].get("format") != "dense":
            raise unsupported(name)
    # For weights, naive-quantized is the same format as float-quantized.
    layouts = "float-quantized", "naive-quantized", "pack-quantized"
    layout = choose(stored, "format", group.get("format"), *layouts)
    _check_activations(group.get("input_activations"), layout)
    read = read_packed if layout == "pack-quantized" else _read_floats
    ignored = read_names(stored.get("ignore"))
    return Quantization("compressed-tensors", read(group["weights"]), ignored)


def _check_activations(inputs: Any, layout: str) -> None:
    """Raise unless input_activations is empty or, with FP8 weights, dynamic FP8 (then ignored)."""
    dynamic_fp8 = {"num_bits": 8, "type": "float", "dynamic": True}
    if inputs and (
        layout == "pack-quantized"
        or any(inputs[key] != value for key, value in dynamic_fp8.items())
    ):
        raise unsupported(f"input_activations {inputs!r:.120}", "dynamic FP8 with FP8 weights")


def _read_floats(weights: Mapping[str, Any]) -> WeightFormat:
    choose(weights, "num_bits", None, 8)
    choose(weights, "type", None, "float")
    choose(weights, "symmetric", True, True)
    strategy = choose(weights, "strategy", None, "tensor", "channel", "block")
    return read_block(weights["block_structure"] if strategy == "block" else None)


# `quant_method` -> reader of the other fields. These are vLLM's names, as in QUANTIZATION_METHODS.
METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": read_fp8,
    "compressed-tensors": _read_compressed,
    "awq": read_awq,
    "gptq": read_gptq,
}
