"""The CPU platform: every weight layout is a linear, the pool is lazy, limits are honoured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.platforms import cpu, cpu_linear, create_platform
from nanovllm.platforms.base import PackLinear
from nanovllm.platforms.cpu import CpuPlatform, available_memory

GIB = 1 << 30
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(1, 1), (1, 33), (33, 1), (7, 5), (64, 64), (127, 65), (65, 255), (300, 96)]
NUM_ROWS = (0, 1, 2, 3, 15, 16, 17, 100)  # none: a step of partial chunks samples nothing


def make(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values / shape[-1] ** 0.5).to(dtype)


def assert_is_linear(
    pack: PackLinear, weight: Tensor, bias: Tensor | None, num_rows: tuple[int, ...] = NUM_ROWS
) -> None:
    """Compare with F.linear in float64 for every number of rows, whatever was packed for."""
    linear = pack(weight.clone(), bias)
    for rows in num_rows:
        x = make(rows, weight.shape[1], dtype=weight.dtype, seed=rows)
        got = linear(x)
        want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert (got.shape, got.dtype) == (want.shape, weight.dtype)
        tolerance = TOLERANCE[weight.dtype]
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


LAYOUTS = [
    cpu_linear.pack_rows,
    cpu_linear.pack_columns,
    cpu_linear.pack_onednn,
    cpu_linear.pack_twice,
]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Thousands of tiny products: on a busy machine, meeting a second thread takes longest."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_every_layout_is_a_linear(
    shape: tuple[int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    weight = make(*shape, dtype=dtype)
    bias = make(shape[0], dtype=dtype, seed=1) if has_bias else None
    for pack in LAYOUTS:
        assert_is_linear(pack, weight, bias)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_take_views_and_strided_inputs(dtype: torch.dtype) -> None:
    """A weight may be a slice of a merged one; x may be a slice of a wider activation."""
    weight = make(96, 48, dtype=dtype)[16:80]
    wide = make(40, 96, dtype=dtype, seed=2)
    for pack in LAYOUTS:
        linear = pack(weight, None)
        for num_rows in (1, 6, 40):
            x = wide[:num_rows, 24:72]
            want = F.linear(x.double(), weight.double())
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(linear(x).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_choice_is_a_linear_and_the_same_every_time(dtype: torch.dtype) -> None:
    weight = make(384, 256, dtype=dtype)
    before = weight.clone()
    with torch.inference_mode():
        pack = CpuPlatform().choose_linear(dtype, weight.nbytes)
        assert_is_linear(pack, weight, make(384, dtype=dtype, seed=9), (1, 16, 33))
    assert torch.equal(weight, before)
    assert all(CpuPlatform().choose_linear(dtype, weight.nbytes) is pack for _ in range(5))


def test_a_model_too_large_for_a_second_copy_gets_one() -> None:
    is_single = {cpu_linear.pack_rows, cpu_linear.pack_onednn}
    assert all(CpuPlatform().choose_linear(dtype, 1 << 50) in is_single for dtype in DTYPES)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_the_cache_is_not_touched_when_allocated() -> None:
    gc.collect()
    before = resident_bytes()
    cache = CpuPlatform().allocate_cache(2 * GIB)
    assert cache.numel() == cache.nbytes == 2 * GIB
    assert resident_bytes() - before < 64 << 20
    views = cache.view(torch.float32).view(4, -1)  # what the layers see is still untouched
    assert views[2, 12345] == 0
    assert cache[-1] == 0
    assert resident_bytes() - before < 64 << 20
    cache[: 256 << 20].fill_(1)
    assert 200 << 20 < resident_bytes() - before < 400 << 20


Limits = Callable[..., None]


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Pretend a machine with 16 GiB free, and cgroup files with the given text."""
    files = [
        (tmp_path / "memory.max", tmp_path / "memory.current"),
        (tmp_path / "memory.limit_in_bytes", tmp_path / "memory.usage_in_bytes"),
    ]
    monkeypatch.setattr(cpu, "_CGROUP_FILES", files)
    monkeypatch.setattr(cpu, "_meminfo", lambda name: 16 * GIB)

    def write(version: int, limit: object, usage: object, stat: str = "") -> None:
        limit_file, usage_file = files[2 - version]
        limit_file.write_text(f"{limit}\n")
        usage_file.write_text(f"{usage}\n")
        (tmp_path / "memory.stat").write_text(stat)

    return write


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limit", "usage", "want"),
    [
        (8 * GIB, 3 * GIB, 5 * GIB),
        (8 * GIB, 9 * GIB, 0),
        (64 * GIB, 3 * GIB, 16 * GIB),
        ("max", 3 * GIB, 16 * GIB),
        (9223372036854771712, 3 * GIB, 16 * GIB),  # how version 1 says "no limit"
    ],
)
def test_available_memory_honours_the_cgroup(
    limits: Limits, version: int, limit: object, usage: int, want: int
) -> None:
    assert available_memory() == 16 * GIB  # no controller at all
    limits(version, limit, usage)
    assert available_memory() == want


def test_the_page_cache_of_the_cgroup_is_available(limits: Limits) -> None:
    """`memory.current` counts file pages, as of the checkpoint just read; they are reclaimable."""
    limits(2, 8 * GIB, 7 * GIB, f"anon {GIB}\nfile {6 * GIB}\ninactive_file {6 * GIB}\n")
    assert available_memory() == 7 * GIB


def test_the_cache_takes_at_most_a_quarter(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    limits(2, 8 * GIB, 4 * GIB)
    platform = CpuPlatform()
    with caplog.at_level("INFO", logger="nanovllm"):
        assert platform.cache_bytes(GIB // 2) == GIB // 2
        assert platform.cache_bytes(GIB) == GIB
        assert platform.cache_bytes(100 * GIB) == GIB
    assert len(caplog.messages) == 3


def test_real_memory_is_read() -> None:
    assert 0 <= available_memory() < 1 << 50


@pytest.mark.parametrize("is_fast", [False, True])
def test_bfloat16_only_where_it_is_fast(monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    monkeypatch.setattr(cpu, "has_fast_bf16", lambda: is_fast)
    platform = create_platform("auto")
    assert platform.choose_dtype("float32") == torch.float32
    for stored in ("bfloat16", "float16"):
        want = torch.bfloat16 if is_fast else torch.float32
        assert platform.choose_dtype(stored) == want
