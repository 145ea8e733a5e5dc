"""How a checkpoint's weights are quantised, read from `quantization_config`: no torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm.errors import ConfigError, UnsupportedQuantisationError

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # the last two are the same
# The values of `quantization`, which are vLLM's names of methods.
METHODS = ("fp8", "compressed-tensors", "awq", "gptq")
Scheme = Literal["fp8_block", "fp8_scaled", "packed_int", "awq", "gptq", "round_to_fp8"]
WHERE = "quantization_config in config.json"
BITS = (4, 8)  # of whole numbers that are packed into words of 32


@dataclass(frozen=True, slots=True)
class QuantLayout:
    """How a weight is stored, where a device's kernels read it as it is."""

    kind: str  # "fp8", "int4", or a block type of GGUF
    group: int  # inputs that share a scale, in order; -1: all of an output's
    has_zeros: bool = False
    scale_dtype: str = "float32"
    block_bytes: int = 0  # of a group, in GGUF


@dataclass(frozen=True, slots=True)
class Quantisation:
    """One scheme for every quantised projection of a checkpoint."""

    method: str  # one of METHODS
    scheme: Scheme  # how a weight is stored, or that it is to be rounded as it is read
    bits: int = 8
    group_size: int = -1  # inputs that share a scale; -1: all of an output's
    is_symmetric: bool = True
    desc_act: bool = False  # inputs are in groups by importance rather than in order
    block_size: tuple[int, int] | None = None  # outputs and inputs that share a scale
    zero_offset: int = 0  # what is added to stored zero points
    zeros_carry: bool = False  # added to words of them, from one into the next
    ignored: tuple[str, ...] = ()  # modules in the model's dtype: names, or "re:" and a pattern

    @property
    def layout(self) -> QuantLayout | None:
        """The layout of weights; None if no kernel may read them."""
        if self.bits == 8 and self.scheme in ("fp8_block", "fp8_scaled", "round_to_fp8"):
            return QuantLayout("fp8", -1 if self.block_size is None else self.block_size[1])
        if self.bits != 4 or self.desc_act:
            return None
        scale_dtype = "bfloat16" if self.scheme == "packed_int" else "float16"
        has_zeros = self.scheme in ("awq", "gptq") or not self.is_symmetric
        return QuantLayout("int4", self.group_size, has_zeros, scale_dtype)

    def ignores(self, module: str) -> bool:
        return any(self._matches(entry, module) for entry in self.ignored)

    def _matches(self, entry: str, module: str) -> bool:
        if entry.startswith("re:"):
            return re.match(entry[3:], module) is not None
        if self.method == "compressed-tensors":
            return entry == module
        return f".{entry}." in f".{module}."  # some whole names of its path


ROUND_TO_FP8 = Quantisation("fp8", "round_to_fp8")


def check_kv_cache(dtype: str, attention_backend: str) -> None:
    """Refuse a cache that is not known, or that the attention asked for does not read."""
    if dtype not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype must be one of {KV_CACHE_DTYPES}, got {dtype!r}")
    if dtype != "auto" and attention_backend == "flash_attn":
        raise ConfigError(
            f"attention_backend='flash_attn' does not read kv_cache_dtype={dtype!r}; use 'auto', "
            "'triton' or 'sdpa', or leave kv_cache_dtype out"
        )


def check_option(asked: str | None) -> None:
    """Refuse a value of the option `quantization` that no checkpoint could make right."""
    if asked not in (None, *METHODS):
        raise ConfigError(f"quantization must be None or one of {METHODS}, got {asked!r}")


def choose_quantisation(asked: str | None, stored: object) -> Quantisation | None:
    """Return how weights are read: as `quantization_config` says, or rounded as is asked for."""
    quantisation = read_quantisation(stored)
    if asked is None or (quantisation is not None and quantisation.method == asked):
        return quantisation
    if quantisation is None and asked == "fp8":
        return ROUND_TO_FP8
    if quantisation is None:
        what = "has no quantised weights; only quantization='fp8' quantises them while it loads"
    else:
        what = f"is quantised by {quantisation.method}"
    raise ConfigError(f"quantization={asked!r}: this checkpoint {what}; leave the option out")


def read_quantisation(stored: object) -> Quantisation | None:
    """Read `quantization_config`; refuse by name what could not be served."""
    if stored is None or stored == {}:
        return None
    if not isinstance(stored, Mapping):
        raise _refusal("what is not an object")
    method = stored.get("quant_method")
    readers = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed,
        "awq": _read_awq,
        "gptq": _read_gptq,
    }
    if not isinstance(method, str) or method not in readers:
        raise _refusal(f"quant_method {method!r:.80}", ", ".join(METHODS))
    return readers[method](stored)


def _read_fp8(stored: Mapping[str, Any]) -> Quantisation:
    _require(stored, "activation_scheme", "dynamic", "dynamic")
    _require(stored, "fmt", "e4m3", "e4m3", "float8_e4m3fn")
    block = _read_block(stored.get("weight_block_size"), "weight_block_size")
    key = "ignored_layers" if stored.get("ignored_layers") else "modules_to_not_convert"
    return Quantisation(
        "fp8",
        "fp8_scaled" if block is None else "fp8_block",
        block_size=block,
        ignored=_read_names(stored, key),
    )


def _read_awq(stored: Mapping[str, Any]) -> Quantisation:
    _require(stored, "bits", 4, 4)
    _require(stored, "version", "gemm", "gemm", "GEMM")
    _require(stored, "zero_point", True, True)
    return Quantisation(
        "awq",
        "awq",
        bits=4,
        group_size=_read_group_size(stored),
        is_symmetric=False,
        ignored=_read_names(stored, "modules_to_not_convert"),
    )


def _read_gptq(stored: Mapping[str, Any]) -> Quantisation:
    _require(stored, "bits", None, *BITS)
    _require(stored, "is_marlin_format", False, False)
    _require(stored, "pack_dtype", "int32", "int32")
    layout = stored.get("checkpoint_format") or stored.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _refusal(f"checkpoint_format {layout!r:.80}")
    if stored.get("dynamic"):
        raise _refusal("dynamic, other numbers for some modules,")
    return Quantisation(
        "gptq",
        "gptq",
        bits=stored["bits"],
        group_size=_read_group_size(stored),
        is_symmetric=_read_flag(stored, "sym", True),
        desc_act=_read_flag(stored, "desc_act", False),
        zero_offset=1 if layout == "gptq" else 0,  # the first format stores one less
        zeros_carry=_is_by_gptqmodel(stored),
        ignored=_read_names(stored, "modules_to_not_convert"),
    )


def _is_by_gptqmodel(stored: Mapping[str, Any]) -> bool:
    """Whether the tool wrote it that subtracts from words of zero points, not from each."""
    meta = stored.get("meta")
    return isinstance(meta, Mapping) and "gptqmodel:" in str(meta.get("quantizer"))


def _read_compressed(stored: Mapping[str, Any]) -> Quantisation:
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refusal("config_groups other than one group")
    [group] = groups.values()
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise _refusal("config_groups without weights")
    if group.get("targets") != ["Linear"]:
        raise _refusal(f"targets {group.get('targets')!r:.80}", "['Linear']")
    layout = group.get("format") or stored.get("format")
    readers = {
        "float-quantized": _read_float_weights,
        "naive-quantized": _read_float_weights,  # the same, where activations are not quantised
        "pack-quantized": _read_packed_weights,
    }
    if not isinstance(layout, str) or layout not in readers:
        raise _refusal(f"format {layout!r:.80}", ", ".join(readers))
    if stored.get("kv_cache_scheme"):
        raise _refusal("kv_cache_scheme, a quantised KV cache,")
    sparsity = stored.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _refusal("sparsity_config, sparse weights,")
    if stored.get("transform_config"):
        raise _refusal("transform_config, rotated activations,")
    if group.get("output_activations"):
        raise _refusal("output_activations, quantised outputs,")
    _check_activations(group.get("input_activations"), layout)
    return readers[layout](group["weights"], _read_names(stored, "ignore"))


def _check_activations(inputs: object, layout: str) -> None:
    """Accept none, and fp8 by token: weights are what counts, activations stay in their dtype."""
    if not inputs:
        return
    known = {"num_bits": 8, "type": "float", "dynamic": True}
    is_known = isinstance(inputs, Mapping) and all(inputs.get(k) == v for k, v in known.items())
    if layout == "pack-quantized" or not is_known:
        raise _refusal(f"input_activations {inputs!r:.120}", "dynamic fp8 with fp8 weights")


def _read_float_weights(weights: Mapping[str, Any], ignored: tuple[str, ...]) -> Quantisation:
    _require(weights, "num_bits", None, 8)
    _require(weights, "type", None, "float")
    _require(weights, "symmetric", True, True)
    _require(weights, "strategy", None, "tensor", "channel", "block")
    block = None
    if weights["strategy"] == "block":
        block = _read_block(weights.get("block_structure"), "block_structure")
        if block is None:
            raise _refusal("strategy 'block' without block_structure")
    scheme: Scheme = "fp8_scaled" if block is None else "fp8_block"
    return Quantisation("compressed-tensors", scheme, block_size=block, ignored=ignored)


def _read_packed_weights(weights: Mapping[str, Any], ignored: tuple[str, ...]) -> Quantisation:
    _require(weights, "num_bits", None, *BITS)
    _require(weights, "type", None, "int")
    _require(weights, "strategy", None, "channel", "group")
    _require(weights, "actorder", None, None, "weight", "static", "group", "dynamic", False, True)
    is_grouped = weights["strategy"] == "group"
    return Quantisation(
        "compressed-tensors",
        "packed_int",
        bits=weights["num_bits"],
        group_size=_read_group_size(weights) if is_grouped else -1,
        is_symmetric=_read_flag(weights, "symmetric", True),
        # Only these store which group each input is in.
        desc_act=weights.get("actorder") in ("group", "dynamic", True),
        ignored=ignored,
    )


def _require(stored: Mapping[str, Any], name: str, default: object, *supported: object) -> None:
    value = stored.get(name)
    value = default if value is None else value
    if not any(type(value) is type(known) and value == known for known in supported):
        raise _refusal(f"{name} {value!r:.80}", ", ".join(map(repr, supported)))


def _read_group_size(stored: Mapping[str, Any]) -> int:
    size = stored.get("group_size")
    if type(size) is not int or not (size == -1 or (8 <= size < 2**31 and size % 8 == 0)):
        raise _refusal(f"group_size {size!r:.80}", "multiples of 8, and -1")
    return size


def _read_block(value: object, name: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = tuple(value) if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or any(type(size) is not int or not 0 < size < 2**31 for size in sizes):
        raise _refusal(f"{name} {value!r:.80}", "two whole numbers")
    return sizes[0], sizes[1]


def _read_flag(stored: Mapping[str, Any], name: str, default: bool) -> bool:
    _require(stored, name, default, True, False)
    value: bool | None = stored.get(name)
    return default if value is None else value


def _read_names(stored: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = stored.get(key) or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _refusal(f"{key} {names!r:.80}", "a list of names")
    for name in names:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except re.error as error:
            raise _refusal(f"{key} {name!r:.80} ({error})") from error
    return tuple(names)


def _refusal(what: str, supported: str = "") -> UnsupportedQuantisationError:
    instead = f" (supported: {supported})" if supported else ""
    return UnsupportedQuantisationError(f"{WHERE}: {what} is not supported{instead}")
