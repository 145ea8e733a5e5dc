"""Feature sets of other CPUs, for tests of the choices that depend on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.devices.cpu import device as cpu_device
from nanovllm.devices.cpu import ops as cpu_ops
from nanovllm.devices.cpu.features import CpuFeatures

FP32, BF16 = torch.float32, torch.bfloat16


def make_features(
    packs: set[torch.dtype], multiplies: set[torch.dtype], has_compiler: bool = True
) -> CpuFeatures:
    return CpuFeatures(frozenset(packs), frozenset(multiplies), has_compiler)


CPUS = {
    "amx": make_features({FP32, BF16}, {FP32, BF16, torch.float16}),
    "avx512": make_features({FP32, BF16}, {FP32}),
    "avx2": make_features({FP32}, {FP32}),
    "arm-bf16": make_features({FP32}, {FP32, BF16}),
    "arm": make_features({FP32}, {FP32}),
    "no-onednn": make_features(set(), {FP32}),
    "no-numba": make_features({FP32}, {FP32}, has_compiler=False),
}


class Products:
    """Records which kernels multiply many rows, and replaces them by matmuls in float32."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: set[str] = set()
        self._linear = F.linear
        monkeypatch.setattr(cpu_ops, "pack_onednn", self._pack)
        monkeypatch.setattr(F, "linear", self._run)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            self.noted.add(f"packed {weight.dtype}".replace("torch.", ""))
            return self._exact(x, weight, bias)

        return run

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.noted.add(f"rows {weight.dtype}".replace("torch.", ""))
        return self._exact(x, weight, bias)

    def _exact(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        summand = None if bias is None else bias.float()
        return self._linear(x.float(), weight.float(), summand).to(x.dtype)


@pytest.fixture(params=list(CPUS))
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a CPU; new engines detect its features."""
    monkeypatch.setattr(cpu_device, "find_cpu_features", lambda: CPUS[request.param])
    name: str = request.param
    return name
