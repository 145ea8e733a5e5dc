"""Products of quantized weights, compiled, equal plain torch; test_interpreted.py needs no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.devices import NEEDS_GPU
from tests.devices.cuda.kernels.interpreted import quantized_cases as cases

pytestmark = NEEDS_GPU
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@DTYPES
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_products(dtype: torch.dtype, large: bool, kind: str) -> None:
    cases.check_products(dtype, "cuda", large, (kind,))


@DTYPES
def test_partial_sums(dtype: torch.dtype) -> None:
    cases.check_partial_sums(dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_experts(dtype: torch.dtype, large: bool, kind: str) -> None:
    cases.check_experts(dtype, "cuda", (kind,), large)


@DTYPES
def test_dequantize(dtype: torch.dtype) -> None:
    cases.check_packing("cuda")
    cases.check_dequantize(dtype, "cuda")


@DTYPES
def test_quantized_rows(dtype: torch.dtype) -> None:
    cases.check_quantized_rows(dtype, "cuda")
    cases.check_normed_rows(dtype, "cuda")
    cases.check_scaled_sums(dtype, "cuda")


def test_products_of_quantized_rows() -> None:
    cases.check_quantized_products("cuda")
    cases.check_uneven_blocks("cuda")


def test_every_fp8_value_is_upcast_correctly() -> None:
    """All 254 FP8 numbers, including subnormal ones, through a product with ones and zeros."""
    cases.check_every_fp8_code("cuda")
