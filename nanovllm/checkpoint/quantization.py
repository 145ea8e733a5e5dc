"""The quantization of a checkpoint, read from `quantization_config`, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm.config import QUANTIZATION_METHODS
from nanovllm.errors import ConfigError, UnsupportedQuantisationError

Scheme = Literal["fp8_block", "fp8_scaled", "packed_int", "awq", "gptq", "round_to_fp8"]
WHERE = "quantization_config in config.json"
BITS = (4, 8)  # integer widths that may be packed into 32-bit words


@dataclass(frozen=True, slots=True)
class QuantLayout:
    """The layout of a stored weight that kernels can read without dequantizing it first."""

    kind: str  # "fp8", "int4", or a GGUF quant block type
    # Number of consecutive inputs per scale, or per GGUF quant block; -1: one scale per output
    # channel.
    group: int
    has_zeros: bool = False
    scale_dtype: str = "float32"
    block_bytes: int = 0  # bytes of a GGUF quant block; 0: not GGUF


Layouts = Callable[[str], QuantLayout | None]  # module name -> layout; None: dense


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization scheme that all quantized projections of a checkpoint share."""

    method: str  # one of QUANTIZATION_METHODS
    scheme: Scheme  # the storage format, or round_to_fp8: quantize while loading
    bits: int = 8
    group_size: int = -1  # number of inputs per scale; -1: one scale per output channel
    is_symmetric: bool = True
    # Act-order: inputs are grouped by activation importance, so a group is not contiguous (g_idx).
    desc_act: bool = False
    block_size: tuple[int, int] | None = None  # (outputs, inputs) of a block that shares a scale
    zero_offset: int = 0  # number to add to the stored zero points
    # Whether the offset is added to whole words, with carries from one zero point to the next.
    zeros_carry: bool = False
    ignored: tuple[str, ...] = ()  # unquantized modules: names, or regexes that follow "re:"

    @property
    def layout(self) -> QuantLayout | None:
        """The layout of the weights, or None if no kernel can read them."""
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
        return f".{entry}." in f".{module}."  # match complete path components


ROUND_TO_FP8 = Quantization("fp8", "round_to_fp8")


def choose_quantization(asked: str | None, stored: object) -> Quantization | None:
    """Return the quantization in `quantization_config`, or the one that the user requested."""
    quantization = read_quantization(stored)
    if asked is None or (quantization is not None and quantization.method == asked):
        return quantization
    if quantization is None and asked == "fp8":
        return ROUND_TO_FP8
    if quantization is None:
        what = "has no quantized weights; only quantization='fp8' quantizes them while it loads"
    else:
        what = f"is quantized by {quantization.method}"
    raise ConfigError(f"quantization={asked!r}: this checkpoint {what}; leave the option out")


def read_quantization(stored: object) -> Quantization | None:
    """Read `quantization_config`; unsupported values raise an error that names them."""
    if stored is None or stored == {}:
        return None
    if not isinstance(stored, Mapping):
        raise _unsupported("a value that is not an object")
    readers = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed,
        "awq": _read_awq,
        "gptq": _read_gptq,
    }
    reader = readers[_choose(stored, "quant_method", None, *QUANTIZATION_METHODS)]
    try:
        return reader(stored)
    except (TypeError, ValueError, KeyError, AttributeError, re.error) as error:
        raise _unsupported(f"a missing value or wrong type ({error!r:.120})") from error


def _read_fp8(stored: Mapping[str, Any]) -> Quantization:
    _choose(stored, "activation_scheme", "dynamic", "dynamic")
    _choose(stored, "fmt", "e4m3", "e4m3", "float8_e4m3fn")
    block = stored.get("weight_block_size")
    ignored = stored.get("ignored_layers") or stored.get("modules_to_not_convert")
    return _float_weights("fp8", block, ignored)


def _float_weights(method: str, block: list[int] | None, ignored: object) -> Quantization:
    if block is None:
        return Quantization(method, "fp8_scaled", ignored=_read_names(ignored))
    rows, columns = block
    if not all(type(size) is int and 0 < size < 2**31 for size in block):
        raise _unsupported(f"blocks of {block!r:.80}", "two positive integers")
    ignored_names = _read_names(ignored)
    return Quantization(method, "fp8_block", block_size=(rows, columns), ignored=ignored_names)


def _read_awq(stored: Mapping[str, Any]) -> Quantization:
    _choose(stored, "version", "gemm", "gemm", "GEMM")
    _choose(stored, "zero_point", True, True)
    return Quantization(
        "awq",
        "awq",
        bits=_choose(stored, "bits", 4, 4),
        group_size=_read_group_size(stored),
        is_symmetric=False,
        ignored=_read_names(stored.get("modules_to_not_convert")),
    )


def _read_gptq(stored: Mapping[str, Any]) -> Quantization:
    _choose(stored, "is_marlin_format", False, False)
    _choose(stored, "pack_dtype", "int32", "int32")
    layout = stored.get("format") or "gptq"
    layout = _choose(stored, "checkpoint_format", layout, "gptq", "gptq_v2")
    if stored.get("dynamic"):
        raise _unsupported("dynamic (other settings for some modules)")
    # GPTQModel subtracts the offset from whole words, not from each zero point.
    quantizer = str((stored.get("meta") or {}).get("quantizer"))
    return Quantization(
        "gptq",
        "gptq",
        bits=_choose(stored, "bits", None, *BITS),
        group_size=_read_group_size(stored),
        is_symmetric=_choose(stored, "sym", True, True, False),
        desc_act=_choose(stored, "desc_act", False, True, False),
        zero_offset=1 if layout == "gptq" else 0,  # version 1 stores zero points minus one
        zeros_carry="gptqmodel:" in quantizer,
        ignored=_read_names(stored.get("modules_to_not_convert")),
    )


def _read_compressed(stored: Mapping[str, Any]) -> Quantization:
    groups = list(stored["config_groups"].values())
    if len(groups) != 1:
        raise _unsupported("config_groups with other than one group")
    group = groups[0]
    _choose(group, "targets", None, ["Linear"])
    _choose(group, "output_activations", {}, {})
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if stored.get(name) and stored[name].get("format") != "dense":
            raise _unsupported(name)
    # For weights, naive-quantized is the same format as float-quantized.
    layouts = "float-quantized", "naive-quantized", "pack-quantized"
    layout = _choose(stored, "format", group.get("format"), *layouts)
    weights, ignored = group["weights"], stored.get("ignore")
    _check_activations(group.get("input_activations"), layout)
    if layout == "pack-quantized":
        return _read_packed_weights(weights, ignored)
    _choose(weights, "num_bits", None, 8)
    _choose(weights, "type", None, "float")
    _choose(weights, "symmetric", True, True)
    strategy = _choose(weights, "strategy", None, "tensor", "channel", "block")
    block = weights["block_structure"] if strategy == "block" else None
    return _float_weights("compressed-tensors", block, ignored)


def _check_activations(inputs: Any, layout: str) -> None:
    """Raise unless input_activations is empty or, with FP8 weights, dynamic FP8 (then ignored)."""
    known = {"num_bits": 8, "type": "float", "dynamic": True}
    if inputs and (layout == "pack-quantized" or any(inputs[key] != known[key] for key in known)):
        raise _unsupported(f"input_activations {inputs!r:.120}", "dynamic FP8 with FP8 weights")


def _read_packed_weights(weights: Mapping[str, Any], ignored: object) -> Quantization:
    _choose(weights, "type", None, "int")
    orders = None, "weight", "static", "group", "dynamic", False, True
    order = _choose(weights, "actorder", None, *orders)
    is_grouped = _choose(weights, "strategy", None, "channel", "group") == "group"
    return Quantization(
        "compressed-tensors",
        "packed_int",
        bits=_choose(weights, "num_bits", None, *BITS),
        group_size=_read_group_size(weights) if is_grouped else -1,
        is_symmetric=_choose(weights, "symmetric", True, True, False),
        desc_act=order in ("group", "dynamic", True),  # only these store the group of each input
        ignored=_read_names(ignored),
    )


def _choose(stored: Mapping[str, Any], name: str, default: object, *supported: object) -> Any:
    """Return the value of a field, which must be one of `supported`."""
    value = stored.get(name)
    value = default if value is None else value
    if not any(type(value) is type(known) and value == known for known in supported):
        raise _unsupported(f"{name} {value!r:.80}", ", ".join(map(str, supported)))
    return value


def _read_group_size(stored: Mapping[str, Any]) -> int:
    size = stored.get("group_size")
    if type(size) is not int or not (size == -1 or (8 <= size < 2**31 and size % 8 == 0)):
        raise _unsupported(f"group_size {size!r:.80}", "multiples of 8, and -1")
    return size


def _read_names(names: Any) -> tuple[str, ...]:
    if not isinstance(names or [], list | tuple):
        raise _unsupported(f"{names!r:.80} in place of a list of modules")
    for name in names or ():
        re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
    # In a multimodal model, the text model's modules have a prefix that our names lack.
    return tuple(name.replace("language_model.", "") for name in names or ())


def _unsupported(what: str, supported: str = "") -> UnsupportedQuantisationError:
    instead = f" (supported: {supported})" if supported else ""
    return UnsupportedQuantisationError(f"{WHERE}: {what} is not supported{instead}")
