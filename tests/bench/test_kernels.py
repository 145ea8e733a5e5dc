"""benchmarks/kernels/: shapes, floors and lines; configurations to try are right."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels.linear import (
    Shape,
    few_rows_candidates,
    make_weights,
    one_row_candidates,
    shapes_by_name,
)
from benchmarks.kernels.timing import defect, floor, line, take_turns


def test_shapes_that_models_share_are_measured_once() -> None:
    shapes = shapes_by_name(["qwen3-8b", "llama-3.1-8b"])
    assert len(shapes) == 8
    assert shapes[Shape(6144, 4096)] == ["qwen3-8b qkv", "llama-3.1-8b qkv"]
    assert shapes[Shape(24576, 4096, is_gated=True)] == ["qwen3-8b gate_up"]


def test_weights_outgrow_the_cache() -> None:
    weights = make_weights(Shape(1024, 2048), torch.device("meta"))
    assert sum(weight.nbytes for weight in weights) > 400e6
    assert len(make_weights(Shape(151936, 4096), torch.device("meta"))) == 8  # the same, in turn


def test_configurations_to_try() -> None:
    """Tiles of a useful size; parts only where a norm sums them, blocks for the rows there are."""
    names = list(dict(one_row_candidates(Shape(4096, 1024))))
    assert {"1x1024w4", "16x1024w8"} <= set(names)
    assert not {"1x512w4", "2x2048w4"} & set(names)
    names = list(dict(few_rows_candidates(Shape(6144, 4096), torch.empty(8, 0))))
    assert all(name.startswith("16x") and name.endswith("p1") for name in names)
    summed = Shape(4096, 4096, is_summed=True)
    names = list(dict(few_rows_candidates(summed, torch.empty(256, 0))))
    assert {name.split("x")[0] for name in names} == {"64", "128"}
    assert {name[-2:] for name in names} == {"p1", "p2", "p4", "p8"}


def test_floors_and_lines() -> None:
    assert floor(4.28e6, 0) == pytest.approx(1.0)
    assert floor(4.28e6, 788e7) == pytest.approx(10.0)  # arithmetic
    times = {"cuBLAS": 9.0, "a": 8.4, "b": 7.25, "c": 9.9, "d": 8.0}
    words = line("8 rows", times, ("cuBLAS", "ours"), 7.84).split()
    assert words[2:8] == ["cuBLAS", "9.00", "ours", "nan", "floor", "7.84"]
    assert words[8:] == ["b", "7.25", "d", "8.00", "a", "8.40"]


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
