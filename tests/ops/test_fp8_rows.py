"""FP8 rows: every value is rounded to the nearest FP8 value times a power of two."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanovllm.ops.fp8 import (
    FP8,
    LARGEST_FP8,
    MAX_EXPONENT,
    MIN_EXPONENT,
    NOT_FINITE,
    dequantize,
    quantize,
)

VALUES = torch.arange(256).to(torch.uint8).view(FP8).double()
NUMBERS = VALUES[VALUES.isfinite()].sort().values
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def make_rows(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of all magnitudes of the dtype, some with an outlier."""
    generator = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)
    exponents = torch.linspace(math.log2(info.tiny) - 5, math.log2(info.max) - 6, 400)
    rows = torch.randn(400, 48, generator=generator) * exponents.exp2()[:, None]
    rows[::3, 7] *= 4
    return rows.to(dtype)


@DTYPES
def test_every_value_is_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    rows = make_rows(dtype)
    fp8 = quantize(rows)
    scales = torch.exp2(fp8.exponents.double() - 127)[:, None]
    want = rows.double() / scales
    distance = (want.abs()[..., None] - NUMBERS[NUMBERS >= 0]).abs().amin(-1)
    torch.testing.assert_close((fp8.values.double() - want).abs(), distance, rtol=0, atol=0)
    assert torch.equal(fp8.values.float(), want.float().to(FP8).float())  # ties as well
    assert bool((want.abs().amax(-1) <= LARGEST_FP8).all())


def test_scales_are_as_small_as_they_can_be() -> None:
    """Half the scale would put the largest value out of range, except at the minimum scale."""
    rows = make_rows()
    exponents = quantize(rows).exponents.long()
    largest = rows.double().abs().amax(-1) / torch.exp2(exponents.double() - 127)
    is_least = exponents == MIN_EXPONENT
    assert bool(is_least.any())
    assert bool(((largest > LARGEST_FP8 / 2) | is_least).all())
    assert int(exponents.max()) <= MAX_EXPONENT


@DTYPES
def test_dequantized_values_are_exact_in_bfloat16_and_wider_types(dtype: torch.dtype) -> None:
    fp8 = quantize(make_rows(dtype))
    exact = fp8.values.double() * torch.exp2(fp8.exponents.double() - 127)[:, None]
    for wide in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(fp8, wide).double(), exact)


@DTYPES
def test_finite_values_stay_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    edges = [
        0.0,
        -0.0,
        info.max,
        -info.max,
        info.tiny,
        info.smallest_normal / 8,
        LARGEST_FP8,
        464.0,
    ]
    edges += [LARGEST_FP8 * 2.0**5, 449.0, 1.75, 1.8, 2.0, 1.0]
    for first in edges:
        rows = torch.tensor([[first, 1e-3], [first, 0.0], [first, first]], dtype=dtype)
        fp8 = quantize(rows)
        for wide in (dtype, torch.float32):
            read = dequantize(fp8, wide)
            assert bool(read.isfinite().all()), first
            if info.tiny * 512 < abs(first) < 1e38:
                torch.testing.assert_close(read[:, 0], rows[:, 0].to(wide), rtol=1 / 16, atol=0)


def test_zeros_are_zeros() -> None:
    fp8 = quantize(torch.zeros(2, 3, 16))
    assert fp8.exponents.shape == (2, 3)
    assert not dequantize(fp8, torch.float32).any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_not_read_as_numbers(value: float) -> None:
    rows = torch.ones(3, 16)
    rows[1, 5] = value
    fp8 = quantize(rows)
    assert fp8.exponents.tolist() == [119, NOT_FINITE, 119]
    read = dequantize(fp8, torch.bfloat16)
    assert read.isnan().all(-1).tolist() == [False, True, False]


def test_quantizing_again_changes_nothing() -> None:
    """Quantizing dequantized rows again changes nothing."""
    read = dequantize(quantize(make_rows()), torch.float32)
    assert torch.equal(dequantize(quantize(read), torch.float32), read)
