"""The batch sizes that have a graph; tests/test_gpu.py runs the graphs."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("triton")

from nanovllm.devices.cuda.decode_graphs import graph_sizes


@pytest.mark.parametrize("max_rows", [*range(1, 20), 100, 255, 256, 257, 300, 512, 1000])
def test_graph_sizes(max_rows: int) -> None:
    """Sizes are dense up to 16, padding is limited, and the largest batch has its own size."""
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert set(range(1, min(max_rows, 16) + 1)) <= set(sizes)
    assert all(larger <= size + max(1, size // 4) for size, larger in pairwise(sizes))
    assert not set(range(209, 256)) & set(sizes) - {max_rows}  # 256 rows are as fast
