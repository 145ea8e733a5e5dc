"""benchmarks/linear.py: shapes, configurations to try, floors; each way to project is right."""

from __future__ import annotations

import pickle

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.linear import ROWS, floor, line, main, make_weights, shapes_by_name
from benchmarks.linear_variants import (
    Shape,
    candidates,
    chosen,
    few_rows_candidates,
    one_row_candidates,
)
from nanovllm.bench.models import model_names
from nanovllm.errors import ConfigError
from tests.devices import run_interpreted

CPU = torch.device("cpu")


def test_shapes_that_models_share_are_measured_once() -> None:
    shapes = shapes_by_name(["qwen3-8b", "llama-3.1-8b"])
    assert len(shapes) == 8
    assert shapes[Shape(6144, 4096)] == ["qwen3-8b qkv", "llama-3.1-8b qkv"]
    assert shapes[Shape(24576, 4096, is_gated=True)] == ["qwen3-8b gate_up"]
    assert shapes[Shape(4096, 14336, is_summed=True)] == ["llama-3.1-8b down"]
    assert shapes[Shape(151936, 4096)] == ["qwen3-8b head"]
    assert str(Shape(24576, 4096, is_gated=True)) == "24576 x 4096 gated"


def test_one_row_candidates() -> None:
    names = [variant.name for variant in one_row_candidates(Shape(4096, 4096))]
    assert len(names) == len(set(names)) == 32
    assert {"1x1024w4", "2x4096w8", "16x1024w4"} <= set(names)
    assert not {"1x512w4", "8x4096w4", "16x2048w8"} & set(names)
    assert "2x2048w4" not in [variant.name for variant in one_row_candidates(Shape(4096, 1024))]


def test_few_rows_candidates() -> None:
    """Parts only where a norm sums them, blocks for the rows there are, stages that fit."""
    names = [variant.name for variant in few_rows_candidates(Shape(6144, 4096), 8, CPU)]
    assert all(name.startswith("16x") and name.endswith("p1") for name in names)
    summed = Shape(4096, 4096, is_summed=True)
    names = [variant.name for variant in few_rows_candidates(summed, 256, CPU)]
    assert len(names) == len(set(names))
    assert {name.split("x")[0] for name in names} == {"64", "128"}
    assert {name[-2:] for name in names} == {"p1", "p2", "p4", "p8"}
    assert all(1 <= int(name.split("s")[1].split("p")[0]) <= 8 for name in names)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_variants_travel_to_other_processes(num_rows: int) -> None:
    shape = Shape(4096, 4096, is_summed=True)
    for variant in [chosen(shape), *candidates(shape, num_rows, CPU)]:
        assert pickle.loads(pickle.dumps(variant)).name == variant.name


def test_weights_outgrow_the_cache() -> None:
    weights = make_weights(Shape(1024, 2048), torch.device("meta"))
    assert sum(weight.nbytes for weight in weights) > 400e6
    assert len(make_weights(Shape(151936, 4096), torch.device("meta"))) == 1


def test_floors() -> None:
    shape = Shape(4096, 4096)
    assert floor(shape, 1) == floor(shape, 128) == pytest.approx(4096 * 4096 * 2 / 4.28e6)
    assert floor(shape, 256) == pytest.approx(4096 * 4096 * 512 / 788e6)  # arithmetic


def test_lines() -> None:
    timings = {"cuBLAS": 9.0, "ours": 8.5, "a": 8.4, "b": 7.25, "c": 9.9, "d": 8.0}
    words = line(Shape(4096, 4096), 8, timings).split()
    assert words[:2] == ["8", "rows"]
    assert words[2:8] == ["cuBLAS", "9.00", "ours", "8.50", "floor", "7.84"]
    assert words[8:] == ["b", "7.25", "d", "8.00", "a", "8.40"]
    assert line(Shape(64, 64), 8, {"cuBLAS": 1.0}).split()[4:6] == ["ours", "-"]


def test_every_way_to_project_is_right() -> None:
    printed = run_interpreted("tests.bench.interpreted_variants")
    assert printed.split() == ["summed", "gated", "plain"]


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr("sys.argv", ["linear", "--rows", "1"])
    with pytest.raises(ConfigError, match="no CUDA device"):
        main()


def test_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["linear", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*model_names(), "--sweep"))
    assert " ".join(map(str, ROWS)) in shown
