"""The kernels of experts, compiled, equal plain torch; test_interpreted.py needs no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.devices.cuda.kernels.interpreted import experts_cases as cases
from tests.ops.expert_layers import Layer

HAS_GPU = torch.cuda.is_available()
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
class TestCompiled:
    @DTYPES
    def test_routing(self, dtype: torch.dtype) -> None:
        cases.check_routing(dtype, "cuda")

    def test_routing_of_strange_logits(self) -> None:
        cases.check_routing_of_strange_logits("cuda")

    @DTYPES
    def test_experts(self, dtype: torch.dtype) -> None:
        cases.check_experts(dtype, "cuda")

    @DTYPES
    def test_every_tile(self, dtype: torch.dtype) -> None:
        cases.check_every_tile(dtype, "cuda")

    @DTYPES
    def test_a_broken_token_changes_no_other(self, dtype: torch.dtype) -> None:
        cases.check_a_broken_token_changes_no_other(dtype, "cuda")

    @DTYPES
    def test_shared_expert(self, dtype: torch.dtype) -> None:
        cases.check_shared_expert(dtype, "cuda")

    @DTYPES
    @pytest.mark.parametrize("num_tokens", [1, 4, 5, 64, 700])
    def test_a_layer_of_a_model(self, num_tokens: int, dtype: torch.dtype) -> None:
        cases.check_layer(Layer(num_tokens, 60, 8, 1024, 768), dtype, "cuda")

    def test_after_norm(self) -> None:
        cases.check_after_norm("cuda")

    def test_a_graph_chooses_anew(self) -> None:
        for num_tokens in (1, 3, 40):
            cases.check_graph(Layer(num_tokens, 60, 8, 256, 192))
