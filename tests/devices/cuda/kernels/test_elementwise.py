"""The fused kernels, compiled, equal plain torch; test_interpreted.py does it without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.devices.cuda.kernels.linear_few_rows import choose_splits
from tests.devices.cuda.kernels.interpreted import delta_net_cases
from tests.devices.cuda.kernels.interpreted import fused_cases as cases

HAS_GPU = torch.cuda.is_available()
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)


def test_splits_are_for_few_rows_and_more_rows_of_small_weights() -> None:
    def parts(num_rows: int, num_out: int, num_in: int) -> int:
        weight = torch.empty(num_out, num_in, dtype=torch.bfloat16, device="meta")
        return choose_splits(num_rows, weight)

    assert [parts(rows, 1024, 3072) for rows in (1, 2, 64, 256, 257)] == [1, 4, 4, 4, 1]
    assert [parts(rows, 4096, 4096) for rows in (1, 2, 64, 65)] == [1, 2, 2, 1]
    assert [parts(rows, 4096, 12288) for rows in (2, 64, 256)] == [2, 2, 1]
    assert parts(16, 1024, 128) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
class TestCompiled:
    @DTYPES
    def test_norms_and_gate(self, dtype: torch.dtype) -> None:
        cases.check_norms_and_gate(dtype, "cuda")

    @DTYPES
    def test_multiply_sigmoid(self, dtype: torch.dtype) -> None:
        cases.check_multiply_sigmoid(dtype, "cuda")

    @DTYPES
    def test_gated_delta_net(self, dtype: torch.dtype) -> None:
        sizes = *delta_net_cases.SIZES, *delta_net_cases.LARGE
        delta_net_cases.check_gated_delta_net(dtype, "cuda", sizes)

    @DTYPES
    def test_rope_write(self, dtype: torch.dtype) -> None:
        cases.check_rope_write(dtype, "cuda")

    @DTYPES
    def test_one_row_linear(self, dtype: torch.dtype) -> None:
        cases.check_one_row_linear(dtype, "cuda")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_few_rows_linear(self, dtype: torch.dtype) -> None:
        cases.check_few_rows_linear(dtype, "cuda")

    @DTYPES
    def test_projections_of_any_number_of_rows(self, dtype: torch.dtype) -> None:
        cases.check_projections_of_any_number_of_rows(dtype, "cuda")

    def test_padding_and_gathering(self) -> None:
        cases.check_padding_is_not_written("cuda")
        cases.check_gather_decode("cuda")
        cases.check_gather_tokens("cuda")
        cases.check_write_words("cuda")
