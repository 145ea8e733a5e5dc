"""The residual stream between two norms."""

from __future__ import annotations

import torch

from nanovllm.ops.interface import DequantScales, ResidualStream


def test_partial_sums_of_a_single_token_are_added_up() -> None:
    """Kernels of one row need a complete update, not partial sums."""
    residual, update = torch.randn(5, 8).bfloat16(), torch.randn(4, 5, 8)
    one = ResidualStream(residual, update).select(torch.tensor([3]))
    assert one.update is not None
    assert torch.equal(one.update, update[:, 3:4].sum(0).bfloat16())
    assert torch.equal(one.residual, residual[3:4])


def test_partial_sums_of_more_tokens_stay() -> None:
    hidden = ResidualStream(torch.randn(5, 8), torch.randn(4, 5, 8)).select(torch.tensor([3, 1]))
    assert hidden.update is not None
    assert hidden.update.shape == (4, 2, 8)


def test_sums_of_codes_are_scaled_for_a_single_token() -> None:
    residual, sums = torch.randn(5, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    scales = DequantScales(torch.rand(5, 1), torch.rand(8, 1))
    hidden = ResidualStream(residual, sums, scales)
    one = hidden.select(torch.tensor([3]))
    assert one.update is not None
    assert one.scales is None
    assert torch.equal(one.update, scales.apply(sums)[3:4].bfloat16())
    more = hidden.select(torch.tensor([3, 1]))
    assert more.update is not None
    assert more.scales is not None
    assert torch.equal(more.scales.apply(more.update), scales.apply(sums)[[3, 1]])
