"""benchmarks/kernels/: shapes, floors and timing."""

from __future__ import annotations

import json
from ctypes import sizeof
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.floors import model_cost
from benchmarks.kernels.cublaslt import Algorithm, Found
from benchmarks.kernels.library_choice import CLUSTERS, SPLITS, candidates
from benchmarks.kernels.linear import Shape, make_weights, shapes_by_name
from benchmarks.kernels.reading import layer_bytes
from benchmarks.kernels.timing import defect, floor, take_turns
from benchmarks.models import model_path
from nanovllm.models.config_json import read_model_config


def test_shapes_that_models_share_are_measured_once() -> None:
    shapes = shapes_by_name(["qwen3-8b", "llama-3.1-8b"])
    assert len(shapes) == 8
    assert shapes[Shape(6144, 4096)] == ["qwen3-8b qkv", "llama-3.1-8b qkv"]
    assert shapes[Shape(24576, 4096, is_gated=True)] == ["qwen3-8b gate_up"]


def test_weights_outgrow_the_cache() -> None:
    weights = make_weights(Shape(1024, 2048), torch.device("meta"))
    assert sum(weight.nbytes for weight in weights) > 400e6
    assert (
        len(make_weights(Shape(151936, 4096), torch.device("meta"))) == 8
    )  # the same weights, repeated


def test_floors() -> None:
    assert floor(4.28e6, 0) == pytest.approx(1.0)
    assert floor(4.28e6, 788e7) == pytest.approx(10.0)  # compute-bound


def test_a_step_of_reads_reads_what_a_step_does() -> None:
    config = read_model_config(json.loads(Path(model_path("qwen3-0.6b")).read_text()))
    layer = layer_bytes(config, num_rows=64, context=256)
    cost = model_cost(config, itemsize=2)
    weights = sum(layer[name] for name in ("qkv", "o", "gate_up", "down"))
    assert len(config.layers) * weights == 2 * cost.layer_weights
    assert len(config.layers) * layer["attention"] == 64 * 256 * cost.kv_bytes


def test_wrong_results_are_not_timed() -> None:
    expected = torch.ones(2, 3)
    assert defect(lambda: expected, expected) is None
    assert defect(lambda: torch.full((4, 2, 3), 0.25), expected) is None  # partial sums
    assert defect(lambda: 1.1 * expected, expected) == "wrong by 10.0%"


def test_candidates_take_turns() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    ticks = iter(range(100))
    assert take_turns(runs, 2, lambda: next(ticks)) == {"a": [1, 1], "b": [1, 1]}
    assert order == ["a", "b", "a", "b"]


def test_structs_have_the_sizes_of_the_library() -> None:
    """The sizes are those of cublasLt.h of CUDA 12 and 13."""
    assert len(bytes(Algorithm())) == 64
    assert sizeof(Found) == 96


def test_every_setting_of_an_algorithm_is_a_candidate() -> None:
    class FakeProduct:
        """A product whose algorithms are strings, and which does not support three splits."""

        def proposed(self) -> list[str]:
            return ["a", "b"]

        def tiles(self, algorithm: str) -> list[int]:
            return [7, 9]

        def with_splits(self, algorithm: str, num_splits: int) -> str | None:
            return None if num_splits == 3 else f"{algorithm}/{num_splits}"

        def changed(self, algorithm: str, **settings: int) -> str | None:
            return f"{algorithm}{settings}"

    product: Any = FakeProduct()
    found: list[Any] = list(candidates(product))
    assert found[:4] == ["a", "b", "a/1", "b/1"]
    assert "b/8" in found
    assert "a/3" not in found
    assert len(found) == len(set(found)) == 2 + 2 * (len(SPLITS) - 1) + 2 * len(CLUSTERS)
