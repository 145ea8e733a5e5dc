"""How the weights of a checkpoint are quantized; each format is one file in this folder.

Nothing here imports torch: configurations are read in processes that do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nanovllm.checkpoint.stored_tensors import StoredTensor

Parts = Mapping[str, "StoredTensor"]  # tensors of one module, keyed by the last part of their names


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


class WeightFormat(Protocol):
    """A storage format with the settings of one checkpoint."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors that a module may have."""

    @property
    def layout(self) -> QuantLayout | None:
        """The layout of the weights, or None if no kernel can read them."""

    def open(self, parts: Parts) -> list[StoredTensor]:
        """Return the weights of a module; raise KeyError if one of its tensors is missing."""


@dataclass(frozen=True, slots=True)
class RoundToFp8:
    """No storage format: dense weights are quantized while they load, with a scale per output."""

    @property
    def layout(self) -> QuantLayout:
        return QuantLayout("fp8", -1)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization that all quantized projections of a checkpoint share."""

    method: str  # key of the format in METHODS
    format: WeightFormat | RoundToFp8
    ignored: tuple[str, ...] = ()  # unquantized modules: names, or regexes that follow "re:"

    def ignores(self, module: str) -> bool:
        return any(self._matches(entry, module) for entry in self.ignored)

    def _matches(self, entry: str, module: str) -> bool:
        if entry.startswith("re:"):
            return re.match(entry[3:], module) is not None
        if self.method == "compressed-tensors":
            return entry == module
        return f".{entry}." in f".{module}."  # match complete path components
