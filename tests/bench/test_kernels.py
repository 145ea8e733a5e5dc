"""benchmarks/kernels/: shapes and floors, and how work is timed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels.linear import Shape, make_weights, shapes_by_name
from benchmarks.kernels.timing import defect, floor, take_turns


def test_shapes_that_models_share_are_measured_once() -> None:
    shapes = shapes_by_name(["qwen3-8b", "llama-3.1-8b"])
    assert len(shapes) == 8
    assert shapes[Shape(6144, 4096)] == ["qwen3-8b qkv", "llama-3.1-8b qkv"]
    assert shapes[Shape(24576, 4096, is_gated=True)] == ["qwen3-8b gate_up"]


def test_weights_outgrow_the_cache() -> None:
    weights = make_weights(Shape(1024, 2048), torch.device("meta"))
    assert sum(weight.nbytes for weight in weights) > 400e6
    assert len(make_weights(Shape(151936, 4096), torch.device("meta"))) == 8  # the same, in turn


def test_floors() -> None:
    assert floor(4.28e6, 0) == pytest.approx(1.0)
    assert floor(4.28e6, 788e7) == pytest.approx(10.0)  # arithmetic


def test_wrong_results_are_not_timed() -> None:
    expected = torch.ones(2, 3)
    assert defect(lambda: expected, expected) is None
    assert defect(lambda: torch.full((4, 2, 3), 0.25), expected) is None  # parts of a sum
    assert defect(lambda: 1.1 * expected, expected) == "wrong by 10.0%"


def test_candidates_take_turns() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    ticks = iter(range(100))
    assert take_turns(runs, 2, lambda: next(ticks)) == {"a": [1, 1], "b": [1, 1]}
    assert order == ["a", "b", "a", "b"]
