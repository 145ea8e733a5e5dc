"""The features of the CPU and of the installed torch, detected once."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """The dtypes that are fast on this CPU with this torch; others may be upcast to float32."""

    packs: frozenset[torch.dtype]  # dtypes whose weights oneDNN can repack into its own layout
    multiplies: frozenset[torch.dtype]  # dtypes with native GEMMs, at least as fast as in float32
    has_compiler: bool  # whether numba can compile our kernels, which upcast weights on the fly

    def matmul_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype for GEMMs; those that torch emulates are up to 300 times slower."""
        return dtype if dtype in self.multiplies else torch.float32

    def runs_kernels(self, dtype: torch.dtype) -> bool:
        """Whether our own kernels support this dtype."""
        return self.has_compiler and dtype in (torch.float32, torch.bfloat16)

    def choose_dtype(self, checkpoint_dtype: str, is_quantized: bool) -> torch.dtype:
        """Return bfloat16 if it makes decode at least 1.3 times as fast; otherwise, float32.

        Decode is memory-bound, and our kernels upcast bfloat16 at no cost, so 16-bit weights are
        read in half the time. Quantized weights are as small in both dtypes. Without our kernels,
        every step would upcast weights. benchmarks/engine/cpu_choices.py compares the two dtypes.
        """
        is_float32 = checkpoint_dtype == "float32" or is_quantized or not self.has_compiler
        return torch.float32 if is_float32 else torch.bfloat16


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
    except (AttributeError, RuntimeError):  # oneDNN is missing or does not support this CPU
        return False
    return True


def _native_halves() -> list[torch.dtype]:
    """Return the 16-bit dtypes that oneDNN multiplies natively, without emulation."""
    try:
        has_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        has_fp16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except AttributeError:  # built without oneDNN
        return []
    if torch.cpu._is_avx2_supported():
        # Without AVX512_BF16 or AMX, oneDNN accepts bfloat16 but multiplies in float32.
        checks = torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported
        has_bf16 = has_bf16 and any(check() for check in checks)
    else:
        has_fp16 = False  # ARM has the instructions, but torch does not use them in large GEMMs
    return [torch.bfloat16] * has_bf16 + [torch.float16] * has_fp16


def _has_compiler() -> bool:
    try:
        importlib.import_module("numba")
    except (ImportError, OSError):  # OSError: numba's libraries exist but do not load
        return False
    return True
