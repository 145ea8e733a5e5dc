"""Captured graphs read fixed buffers, and share the memory of what they compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.devices.cuda.graph_pool import GraphPool
from tests.devices import NEEDS_GPU

pytestmark = NEEDS_GPU
NUM_ELEMENTS = 1 << 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_a_replay_reads_its_input_anew(dtype: torch.dtype) -> None:
    pool = GraphPool(torch.device("cuda"), has_kernels=False)
    values = torch.ones(3, 5, dtype=dtype, device="cuda")
    graph = pool.capture(lambda: values + values)
    for value in (2, 7):
        values.fill_(value)
        graph.replay()
        assert torch.equal(graph.output, torch.full_like(values, 2 * value))


@pytest.mark.parametrize("has_kernels", [False, True])
def test_kernels_are_loaded_before_a_capture(has_kernels: bool) -> None:
    pool = GraphPool(torch.device("cuda"), has_kernels)
    values, num_runs = torch.zeros(4, device="cuda"), 0
    values.add_(0)  # loads the kernel

    def run() -> Tensor:
        nonlocal num_runs
        num_runs += 1
        return values.add_(1)

    graph = pool.capture(run)
    assert num_runs == (1 if has_kernels else 2)
    assert values.tolist() == [num_runs - 1] * 4  # a captured call runs nothing
    graph.replay()
    assert values.tolist() == [num_runs] * 4


def test_graphs_share_memory() -> None:
    """Later graphs, of the same size or smaller, reuse the memory of the first one's output."""
    pool = GraphPool(torch.device("cuda"), has_kernels=False)
    values = torch.ones(NUM_ELEMENTS, device="cuda")
    graphs = [pool.capture(lambda: values + 1)]
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    for size in (NUM_ELEMENTS, NUM_ELEMENTS // 2, NUM_ELEMENTS // 4):
        graphs.append(pool.capture(lambda size=size: values[:size] + 2))
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
    for number, graph in enumerate(graphs):
        graph.replay()
        assert graph.output[0].item() == (2 if number == 0 else 3)


def test_a_graph_may_overwrite_the_output_of_another() -> None:
    """As samplers and the persistent kernel do, which allocate nothing."""
    pool = GraphPool(torch.device("cuda"), has_kernels=False)
    values = torch.ones(NUM_ELEMENTS, device="cuda")
    first = pool.capture(lambda: values * 3)
    second = pool.capture(lambda: first.output.add_(1))
    assert second.output.data_ptr() == first.output.data_ptr()
    first.replay()
    second.replay()
    assert first.output.eq(4).all()
