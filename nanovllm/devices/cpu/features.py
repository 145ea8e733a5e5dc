"""What the CPU and the installed torch can do: found out once, handed down to all who choose."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Dtypes that are missing here still work: they are widened to float32 where that is faster."""

    packs: frozenset[torch.dtype]  # weights that oneDNN keeps in a layout of its own
    multiplies: frozenset[torch.dtype]  # by instructions of the CPU, so at float32's speed or more
    has_compiler: bool  # for kernels of ours, which widen weights as they read them

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what to multiply in; what torch emulates takes up to 300 times as long."""
        return dtype if dtype in self.multiplies else torch.float32

    def runs_kernels(self, dtype: torch.dtype) -> bool:
        """Whether kernels of ours run a model of this dtype."""
        return self.has_compiler and dtype in (torch.float32, torch.bfloat16)

    def choose_dtype(self, checkpoint_dtype: str) -> torch.dtype:
        """Return bfloat16 where that halves what a decode step reads and slows no prompt down.

        Decoding waits for memory, and our kernels read bfloat16 at no cost. A product with many
        rows costs what it costs in float32, as its weight is widened once for all of them.
        Without our kernels each step would widen all weights, which is slower than to read them in
        float32. benchmarks/engine/cpu_choices.py measures both.
        """
        if checkpoint_dtype == "float32":
            return torch.float32
        is_read_fast = self.has_compiler or torch.bfloat16 in self.multiplies
        return torch.bfloat16 if is_read_fast else torch.float32


def find_cpu_features() -> CpuFeatures:
    dtypes = torch.float32, torch.bfloat16
    return CpuFeatures(
        packs=frozenset(dtype for dtype in dtypes if _can_pack(dtype)),
        multiplies=frozenset({torch.float32, *_native_halves()}),
        has_compiler=_has_compiler(),
    )


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    x = torch.zeros(32, 32, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(x, 16)
        torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):  # built without it, or not for this CPU
        return False
    return True


def _native_halves() -> list[torch.dtype]:
    """Return the dtypes of 16 bits that oneDNN multiplies, less those that it only emulates."""
    try:
        has_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        has_fp16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except AttributeError:  # built without oneDNN
        return []
    if torch.cpu._is_avx2_supported():
        # x86 with AVX-512 alone: bfloat16 is taken, but multiplied in float32 after all.
        checks = torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported
        has_bf16 = has_bf16 and any(check() for check in checks)
    else:
        has_fp16 = False  # ARM has the instructions, but torch's product of many rows does not
    return [torch.bfloat16] * has_bf16 + [torch.float16] * has_fp16


def _has_compiler() -> bool:
    try:
        importlib.import_module("numba")
    except (ImportError, OSError):  # the latter: its libraries are there and do not load
        return False
    return True
