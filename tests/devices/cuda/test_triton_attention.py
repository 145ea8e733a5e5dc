"""Every backend on CUDA equals the float64 reference, and its decode plan can be captured."""

from __future__ import annotations

import pytest
import torch

from nanovllm.attention.backend import (
    BatchRows,
    DecodeRows,
    GraphedAttention,
)
from nanovllm.config import EngineConfig
from nanovllm.devices.cuda.device import CudaDevice
from nanovllm.ops.interface import LayerCache
from nanovllm.ops.torch_ops import TorchOps
from tests.attention.cases import MIXES, Case, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCK_SIZE = 256


def make_device(name: str) -> CudaDevice:
    if name == "flash_attn":
        pytest.importorskip("flash_attn")
    config = EngineConfig("none", attention_backend=name, kvcache_block_size=BLOCK_SIZE)
    return CudaDevice(config)


def on_device(
    mix: list[tuple[int, int]], window: int | None = None, softcap: float | None = None
) -> tuple[Case, torch.Tensor]:
    """Return a case on the device, with cached keys and values, and its expected output."""
    case = make_case(
        mix,
        block_size=BLOCK_SIZE,
        head_dim=64,
        dtype=torch.bfloat16,
        window=window,
        softcap=softcap,
        scale=0.1,
    )
    case.write(TorchOps())
    want, rows = case.reference(), case.rows
    cache = LayerCache(case.cache.k.cuda(), case.cache.v.cuda())
    tables = rows.block_tables.cuda()
    device_rows = BatchRows(rows.slots, rows.starts, rows.counts, tables)
    return Case(device_rows, cache, case.qkv.cuda(), [], case.spec), want


def assert_close(output: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(output.double().cpu(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["triton", "sdpa", "flash_attn"])
@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, None), (None, 0.5), (50, 0.5)])
def test_equals_the_reference(
    name: str, mix: str, window: int | None, softcap: float | None
) -> None:
    attention = make_device(name).attention(torch.bfloat16, TorchOps())
    case, want = on_device(MIXES[mix], window, softcap)
    plan = attention.plan(case.rows)
    output = attention.attend(case.queries(), case.cache, plan, case.spec)
    assert output.view(len(output), -1).is_contiguous()  # as the next layer requires
    assert_close(output, want)


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_a_graph_reads_its_rows_anew(name: str) -> None:
    device = make_device(name)
    attention = device.attention(torch.bfloat16, TorchOps())
    assert isinstance(attention, GraphedAttention)
    case, want = on_device([(300, 1), (2, 1), (700, 1)])
    slots = torch.tensor([1, 1, 1], dtype=torch.int32, device="cuda")
    context_lens = torch.tensor([3, 3, 3], dtype=torch.int32, device="cuda")
    order = torch.arange(3, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        tables = case.rows.block_tables
        rows = DecodeRows(tables, slots, context_lens, order)
        plan = attention.decode_plan(rows)
        return attention.attend(case.queries(), case.cache, plan, case.spec)

    replay, output = device.graph_pool.capture(run)
    slots.copy_(torch.tensor([0, 1, 2]))
    context_lens.copy_(torch.tensor([301, 3, 701]))
    replay()
    assert_close(output, want)
    context_lens[2] = 0  # padding
    replay()
    assert_close(output[:2], want[:2])
