"""The CPU attention backends equal a float64 reference for any mix of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from nanovllm.attention import sdpa
from nanovllm.attention.backend import BatchRows
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.devices.cpu.features import find_cpu_features
from nanovllm.devices.cpu.numba_attention import NumbaAttention
from nanovllm.devices.cpu.ops import NumbaOps
from nanovllm.devices.cpu.program import Launcher
from nanovllm.ops.interface import LayerCache
from nanovllm.ops.torch_ops import TorchOps
from tests.attention.cases import (
    MIXES,
    Backend,
    Case,
    batch_rows,
    check_last_tokens,
    in_eight_bits,
    make_case,
    make_mixes,
)

pytestmark = pytest.mark.usefixtures("one_thread")
FEATURES = find_cpu_features()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
MakeBackend = Callable[[int, torch.dtype], Backend]  # from the block size and dtype


@pytest.fixture(params=["numba", "sdpa", "plain torch"])
def make_backend(request: pytest.FixtureRequest) -> MakeBackend:
    return partial(build_backend, request.param)


def build_backend(name: str, block_size: int, dtype: torch.dtype) -> Backend:
    matmul_dtype = FEATURES.matmul_dtype(dtype)
    if name == "plain torch":
        return Backend(TorchOps(), SdpaAttention(block_size, matmul_dtype))
    launcher = make_launcher(dtype, torch.get_num_threads())
    if name == "sdpa":
        return Backend(NumbaOps(launcher, FEATURES), SdpaAttention(block_size, matmul_dtype))
    return Backend(NumbaOps(launcher, FEATURES), NumbaAttention(block_size, launcher, matmul_dtype))


@cache
def make_launcher(dtype: torch.dtype, num_threads: int) -> Launcher:
    launcher = Launcher(dtype)
    assert launcher.num_threads == num_threads
    return launcher


def assert_equals_reference(case: Case, make_backend: MakeBackend) -> None:
    dtype = case.qkv.dtype
    output = case.run(make_backend(case.cache.k.shape[1], dtype))
    assert (output.shape, output.dtype) == (case.queries().shape, dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), case.reference(), rtol=tolerance, atol=tolerance)


def test_last_tokens(make_backend: MakeBackend) -> None:
    backend = make_backend(256, torch.float32)
    check_last_tokens(backend.attention, MIXES["everything"], backend.ops)


@DTYPES
@pytest.mark.parametrize("mix", list(MIXES))
def test_equals_the_reference(make_backend: MakeBackend, mix: str, dtype: torch.dtype) -> None:
    assert_equals_reference(make_case(MIXES[mix], dtype=dtype), make_backend)


@DTYPES
@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
@pytest.mark.parametrize("head_dim", [16, 24, 64, 136])
def test_a_cache_of_eight_bits(
    make_backend: MakeBackend, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    """The result is that of the dequantized keys and values, including those of this step."""
    for mix, block_size in (("everything", 48), ("decodes around block borders", 16)):
        case = make_case(
            MIXES[mix], dtype=dtype, head_dim=head_dim, block_size=block_size, window=window
        )
        assert_equals_reference(in_eight_bits(case), make_backend)


def test_what_no_row_has_seen_in_eight_bits_may_be_nan(make_backend: MakeBackend) -> None:
    case = make_case(MIXES["everything"], unused=math.nan)
    assert_equals_reference(in_eight_bits(case), make_backend)


@DTYPES
@pytest.mark.parametrize("window", [1, 15, 16, 40, 75, 600, 5000])
@pytest.mark.parametrize("mix", ["everything", "chunk over several tiles", "long prefill"])
def test_a_window_and_a_scale(
    make_backend: MakeBackend,
    mix: str,
    window: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdpa, "QUERY_TILE", 64)  # the same boundaries in less time
    case = make_case(make_mixes(64)[mix], dtype=dtype, window=window, scale=0.17)
    assert_equals_reference(case, make_backend)


@DTYPES
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("mix", ["everything", "chunk over several tiles", "long prefill"])
def test_softcapping(
    make_backend: MakeBackend,
    mix: str,
    window: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdpa, "QUERY_TILE", 64)
    case = make_case(make_mixes(64)[mix], dtype=dtype, window=window, scale=0.7, softcap=1.5)
    assert_equals_reference(case, make_backend)
    if dtype == torch.float32:
        assert_equals_reference(in_eight_bits(case), make_backend)


@DTYPES
@pytest.mark.parametrize("window", [None, 40])
def test_sinks(make_backend: MakeBackend, window: int | None, dtype: torch.dtype) -> None:
    case = make_case(MIXES["everything"], dtype=dtype, window=window, has_sinks=True)
    assert_equals_reference(case, make_backend)
    if dtype == torch.float32:
        assert_equals_reference(in_eight_bits(case), make_backend)


@pytest.mark.usefixtures("num_threads")
def test_any_number_of_threads(make_backend: MakeBackend) -> None:
    case = make_case([(700, 1)] * 6, num_heads=6, num_kv_heads=3, head_dim=64)
    want = case.reference().float()
    backend = make_backend(16, torch.float32)
    for _ in range(20):  # races between threads depend on timing
        torch.testing.assert_close(case.run(backend), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (6, 2), (9, 3)], ids=str)
def test_block_sizes_and_head_ratios(
    make_backend: MakeBackend, block_size: int, heads: tuple[int, int]
) -> None:
    num_heads, num_kv_heads = heads
    case = make_case(
        MIXES["everything"],
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=24,
    )
    assert_equals_reference(case, make_backend)


@DTYPES
@pytest.mark.parametrize("head_dim", [2, 8, 16, 40, 64, 80, 128, 136])
def test_head_dims(make_backend: MakeBackend, head_dim: int, dtype: torch.dtype) -> None:
    """Test head sizes around the widths of a vector register and of one or more cache lines."""
    mix = [(0, 1), (2, 1), (3, 1), (30, 1), (64, 1), (5, 3)]
    assert_equals_reference(make_case(mix, head_dim=head_dim, dtype=dtype), make_backend)


@DTYPES
@pytest.mark.parametrize("seed", range(6))
def test_random_mixes(make_backend: MakeBackend, seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    mix = [
        (int(rng.choice([0, 0, 1, 15, 16, 33, 300])), int(rng.choice([1, 1, 1, 2, 15, 16, 60])))
        for _ in range(12)
    ]
    block_size = int(rng.choice([16, 32, 48]))
    case = make_case(mix, block_size=block_size, dtype=dtype, seed=seed)
    assert_equals_reference(case, make_backend)


def test_a_row_does_not_depend_on_its_neighbors(make_backend: MakeBackend) -> None:
    mix, backend = MIXES["everything"], make_backend(16, torch.float32)
    case = make_case(mix)
    together, offset = case.run(backend), 0
    for row, (_, count) in enumerate(mix):
        part = slice(offset, offset + count)
        table = case.rows.block_tables[:, 0].numpy()[row : row + 1]
        rows = batch_rows(case.rows.starts[row : row + 1], case.rows.counts[row : row + 1], table)
        alone = Case(rows, case.cache, case.qkv[part], [])
        torch.testing.assert_close(alone.run(backend), together[part])
        offset += count


def test_chunks_equal_the_whole(make_backend: MakeBackend) -> None:
    """A row computed in chunks of any size equals a single prefill."""
    whole, backend = make_case([(0, 100)]), make_backend(16, torch.float32)
    want = whole.run(backend)
    for sizes in ([99, 1], [1, 99], [16, 16, 16, 52], [7] * 14 + [2], [1] * 100):
        cache = LayerCache(torch.zeros_like(whole.cache.k), torch.zeros_like(whole.cache.v))
        start, outputs = 0, []
        for size in sizes:
            part = slice(start, start + size)
            column = np.array([start], np.int32), np.array([size], np.int32)
            rows = batch_rows(*column, whole.rows.block_tables[:, 0].numpy())
            outputs.append(Case(rows, cache, whole.qkv[part], []).run(backend))
            start += size
        torch.testing.assert_close(torch.cat(outputs), want)


def test_rows_may_share_blocks_written_in_the_same_step(make_backend: MakeBackend) -> None:
    """The first row writes the prefix of the second row, which starts in shared blocks."""
    writer = make_case([(0, 40)])
    qkv = torch.cat((writer.qkv, writer.qkv[32:]))
    table = np.concatenate([writer.rows.block_tables[:, 0].numpy()] * 2)
    table[1, 2] = next(i for i in range(1, len(writer.cache.k)) if i not in table[0, :3])
    rows = batch_rows(np.array([0, 32], np.int32), np.array([40, 8], np.int32), table)
    output = Case(rows, writer.cache, qkv, []).run(make_backend(16, torch.float32))
    torch.testing.assert_close(output[40:], output[32:40])
    torch.testing.assert_close(output[:40].double(), writer.reference(), rtol=2e-5, atol=2e-5)


def test_only_the_slots_of_the_step_change(make_backend: MakeBackend) -> None:
    case = make_case(MIXES["everything"])
    before = LayerCache(case.cache.k.clone(), case.cache.v.clone())
    case.run(make_backend(16, torch.float32))
    for cached, old in ((case.cache.k, before.k), (case.cache.v, before.v)):
        is_changed = (cached != old).any(-1).any(-1).reshape(-1)
        assert is_changed.nonzero().squeeze(1).tolist() == sorted(case.slot_mapping().tolist())


@pytest.mark.parametrize("mix", ["decodes of very different lengths", "everything"])
def test_blocks_of_no_row_are_never_read(make_backend: MakeBackend, mix: str) -> None:
    """Padding has no effect, not even as 0 * NaN. Block 0 and the rows' own tails are padding."""
    case = make_case(MIXES[mix])
    used = {0}
    for row, end in zip(
        case.rows.block_tables[:, 0].numpy(), case.rows.starts + case.rows.counts, strict=True
    ):
        used |= set(row[: -(-int(end) // 16)].tolist())
    for block_id in set(range(len(case.cache.k))) - used:
        case.cache.k[block_id] = case.cache.v[block_id] = math.nan
    assert_equals_reference(case, make_backend)


@pytest.mark.parametrize("start", [63, 64, 65, 90])
@pytest.mark.parametrize("count", [1, 30])
def test_blocks_before_a_window_are_never_read(
    make_backend: MakeBackend, start: int, count: int
) -> None:
    """The window has freed them, so another sequence may write NaN to them."""
    case = make_case([(start, count)], window=20)
    for block_id in case.rows.block_tables[0, 0, : (start - 19) // 16].tolist():
        case.cache.k[block_id] = case.cache.v[block_id] = math.nan
    assert_equals_reference(case, make_backend)


def healthy_row(length: int, block_ids: list[int]) -> BatchRows:
    return batch_rows(
        np.array([0], np.int32), np.array([length], np.int32), np.array([block_ids], np.int32)
    )


@pytest.mark.parametrize("place", ["padding", "stale tail"])
def test_a_broken_sequence_does_not_break_others(make_backend: MakeBackend, place: str) -> None:
    """Keys and values of NaN, once written, must not reach rows that never attend to them."""
    backend, block_ids = make_backend(16, torch.float32), [1, 2, 3]
    broken = make_case([(0, 48)])
    num_kv_heads = broken.cache.k.shape[2]
    for heads in broken.qkv[:, -2 * num_kv_heads :].split(num_kv_heads, dim=1):
        heads.fill_(math.nan)
    cache = LayerCache(torch.zeros_like(broken.cache.k), torch.zeros_like(broken.cache.v))
    blocks = [0, 4, 5] if place == "padding" else block_ids
    Case(healthy_row(48, blocks), cache, broken.qkv, []).run(backend)

    case = make_case([(0, 41)], seed=1)
    Case(healthy_row(40, block_ids), cache, case.qkv[:40], []).run(backend)
    long, short = (40, block_ids), (0, [6, 0, 0])  # the short row is padded to the long one's width
    starts, tables = zip(*([long, short] if place == "padding" else [long]), strict=True)
    rows = batch_rows(
        np.array(starts, np.int32), np.ones(len(starts), np.int32), np.array(tables, np.int32)
    )
    qkv = torch.cat((case.qkv[40:], case.qkv[:1]))[: len(starts)]
    output = Case(rows, cache, qkv, []).run(backend)
    want = case.reference()[[40, 0]][: len(starts)]
    torch.testing.assert_close(output.double(), want, rtol=2e-5, atol=2e-5)


@DTYPES
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_stale_tail_does_not_break_a_chunk(
    make_backend: MakeBackend, value: float, dtype: torch.dtype
) -> None:
    """A chunk that continues a prefix reads the cache, whose last block another row has filled."""
    backend, case = make_backend(16, dtype), make_case([(20, 5)], dtype=dtype)
    filler = make_case([(0, 32)], dtype=dtype)
    filler.qkv.fill_(value)
    block_ids = case.rows.block_tables[:, 0].numpy()[0, :2].tolist()
    past = LayerCache(case.cache.k.clone(), case.cache.v.clone())
    Case(healthy_row(32, block_ids), case.cache, filler.qkv, []).run(backend)
    for cached, old in ((case.cache.k, past.k), (case.cache.v, past.v)):
        cached[block_ids[0]] = old[block_ids[0]]
        cached[block_ids[1], :4] = old[block_ids[1], :4]  # the rest of the block stays broken
    assert_equals_reference(case, make_backend)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30], ids=str)
def test_a_broken_row_does_not_break_its_neighbors(make_backend: MakeBackend, value: float) -> None:
    mix, backend = MIXES["everything"], make_backend(16, torch.float32)
    want, case = make_case(mix).run(backend), make_case(mix)
    row_ids = np.repeat(np.arange(len(mix)), case.rows.counts)
    is_broken = torch.from_numpy(np.isin(row_ids, (0, 3)))  # a decode and a chunk
    case.qkv[is_broken] = value
    torch.testing.assert_close(case.run(backend)[~is_broken], want[~is_broken])
