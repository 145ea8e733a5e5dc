"""The CPU device: a lazy KV cache, memory limits, and the choice of fast dtypes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cpu.features import CpuFeatures, find_cpu_features
from nanovllm.devices.cpu.ops import pack_onednn
from nanovllm.worker import host_memory as memory
from nanovllm.worker.host_memory import available_memory, total_memory
from nanovllm.worker.memory_needs import MemoryNeeds
from tests.devices import cpu_device

GIB = 1 << 30
NEEDS = MemoryNeeds(weights=GIB, tables=0, states=0, block=4096, step=GIB, graphs=0)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_the_cache_is_not_touched_when_allocated() -> None:
    gc.collect()
    before = resident_bytes()
    cache = cpu_device().allocate_cache(2 * GIB)
    assert cache.numel() == cache.nbytes == 2 * GIB
    assert resident_bytes() - before < 64 << 20
    views = cache.view(torch.float32).view(4, -1)  # views do not touch the pages
    assert views[2, 12345] == 0
    assert cache[-1] == 0
    assert resident_bytes() - before < 64 << 20
    cache[: 256 << 20].fill_(1)
    assert 200 << 20 < resident_bytes() - before < 400 << 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_token_in_every_layer_takes_no_huge_pages() -> None:
    cache = cpu_device().allocate_cache(256 << 20).view(64, -1)
    cache[0, 0] = 1  # torch itself allocates in its first call
    gc.collect()
    before = resident_bytes()
    cache[:, 0] = 1
    assert resident_bytes() - before < 8 << 20


Limits = Callable[..., None]


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Simulate a machine with 16 GiB free, and cgroup files with the given text."""
    files = [
        (tmp_path / "memory.max", tmp_path / "memory.current"),
        (tmp_path / "memory.limit_in_bytes", tmp_path / "memory.usage_in_bytes"),
    ]
    monkeypatch.setattr(memory, "_cgroup_files", lambda: files)
    monkeypatch.setattr(memory, "_meminfo", lambda name: 16 * GIB)

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
        (9223372036854771712, 3 * GIB, 16 * GIB),  # "no limit" in version 1
    ],
)
def test_available_memory_honors_the_cgroup(
    limits: Limits, version: int, limit: object, usage: int, want: int
) -> None:
    assert available_memory() == 16 * GIB  # no controller at all
    limits(version, limit, usage)
    assert available_memory() == want


@pytest.mark.parametrize(("version", "limit_name"), [(1, "limit_in_bytes"), (2, "max")])
def test_groups_within_groups_limit_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, limit_name: str
) -> None:
    """Cgroups may be nested, a job's in a user's; a container may see its own as the root."""
    lines = {1: "4:cpu,memory:/user/job", 2: "0::/user/job"}
    usage_name = {1: "usage_in_bytes", 2: "current"}[version]
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{lines[version]}\n")
    roots = {"": (tmp_path / "v2", "memory.max", "memory.current")}
    roots["memory"] = (tmp_path / "v1", "memory.limit_in_bytes", "memory.usage_in_bytes")
    monkeypatch.setattr(memory, "_CGROUPS", roots)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_meminfo", lambda name: 16 * GIB)
    root = tmp_path / f"v{version}"
    for group, limit, want in (("user/job", 9, 9), ("user", 5, 5), (".", 7, 5)):
        (root / group).mkdir(parents=True, exist_ok=True)
        (root / group / f"memory.{limit_name}").write_text(str(limit * GIB))
        (root / group / f"memory.{usage_name}").write_text(str(GIB))
        assert (total_memory(), available_memory()) == (want * GIB, (want - 1) * GIB)


def test_the_page_cache_of_the_cgroup_is_available(limits: Limits) -> None:
    """`memory.current` includes reclaimable file pages, such as those of the checkpoint."""
    limits(2, 8 * GIB, 7 * GIB, f"anon {GIB}\nfile {6 * GIB}\ninactive_file {6 * GIB}\n")
    assert available_memory() == 7 * GIB


def test_the_cache_takes_at_most_a_quarter(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    limits(2, 8 * GIB, 4 * GIB)
    device = cpu_device()
    with caplog.at_level("INFO", logger="nanovllm"):
        for wanted, granted in ((GIB // 2, GIB // 2), (GIB, GIB), (100 * GIB, GIB)):
            assert device.cache_bytes(NEEDS, wanted) == granted
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("version", [1, 2])
def test_a_second_copy_takes_at_most_an_eighth(limits: Limits, version: int) -> None:
    device = cpu_device()
    assert device.has_room_for_copy(2 * GIB)  # an eighth of 16
    assert not device.has_room_for_copy(2 * GIB + 1)
    limits(version, 8 * GIB, 0)
    assert device.has_room_for_copy(GIB)
    assert not device.has_room_for_copy(GIB + 1)


def test_room_for_a_second_copy_is_the_same_every_time(limits: Limits) -> None:
    """In bf16 each layout rounds differently, so free memory must not change outputs."""
    for usage in (0, 4 * GIB, 9 * GIB):
        limits(2, 8 * GIB, usage)
        assert cpu_device().has_room_for_copy(GIB)
        assert not cpu_device().has_room_for_copy(GIB + 1)


def test_ranks_share_the_memory(limits: Limits) -> None:
    limits(2, 8 * GIB, 4 * GIB)
    device = cpu_device(data_parallel_size=2)
    assert device.cache_bytes(NEEDS, 100 * GIB) == GIB // 2
    assert device.has_room_for_copy(GIB // 2)
    assert not device.has_room_for_copy(GIB // 2 + 1)


def test_where_the_kernel_is_not_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS reports memory differently, and large models must start there."""
    total = memory._physical_memory()
    assert total == pytest.approx(total_memory(), rel=0.1) or total > total_memory()
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / "absent")
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "absent")
    assert (total_memory(), available_memory()) == (total, total)


def test_real_memory_is_read() -> None:
    assert 0 <= available_memory() <= total_memory() < 1 << 50
    assert cpu_device().has_room_for_copy(1)
    assert not cpu_device().has_room_for_copy(1 << 50)


def test_dtypes_are_chosen_by_the_features() -> None:
    """Our kernels decode bfloat16 weights faster; the size of quantized weights stays the same."""
    for has_compiler, want in ((True, torch.bfloat16), (False, torch.float32)):
        features = CpuFeatures(frozenset(), frozenset({torch.float32}), has_compiler)
        device = CpuDevice(EngineConfig("none"), features=features)
        assert device.choose_dtype("auto", "float32", False) == torch.float32
        assert device.choose_dtype("float16", "float32", False) == torch.float16
        assert device.choose_dtype("bfloat16", "bfloat16", True) == torch.bfloat16
        for stored in ("bfloat16", "float16"):
            assert device.choose_dtype("auto", stored, False) == want
            assert device.choose_dtype("auto", stored, True) == torch.float32


def test_features_are_what_torch_accepts_here() -> None:
    features = find_cpu_features()
    assert torch.float32 in features.multiplies
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(32, 64).to(dtype)
        if dtype in features.packs:
            x = torch.randn(5, 64).to(dtype)
            got, want = pack_onednn(weight, None)(x), x.double() @ weight.double().T
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
        elif torch.backends.mkldnn.is_available():
            with pytest.raises(RuntimeError):
                pack_onednn(weight, None)


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_a_compiler_that_does_not_load_is_none(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """llvmlite raises OSError where its shared library cannot be loaded."""

    def fail(name: str) -> None:
        raise error(name)

    monkeypatch.setattr("importlib.import_module", fail)
    assert not find_cpu_features().has_compiler
