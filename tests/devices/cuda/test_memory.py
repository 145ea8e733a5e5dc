"""The division of a CUDA device's memory: arithmetic that needs no device."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.config import EngineConfig
from nanovllm.devices import choose, ranks
from nanovllm.devices.cuda.memory import GIB, MemoryAccount
from nanovllm.errors import ConfigError

ACCOUNT = MemoryAccount(total=80 * GIB, utilization=0.5, held=20 * GIB, step=4 * GIB, graphs=GIB)


def test_the_cache_gets_what_is_left_of_the_share() -> None:
    assert ACCOUNT.room == 15 * GIB
    assert ACCOUNT.grant(3 * GIB) == 3 * GIB
    assert ACCOUNT.grant(60 * GIB) == 15 * GIB


def test_no_room_is_explained() -> None:
    full = MemoryAccount(80 * GIB, 0.25, held=19 * GIB, step=GIB, graphs=0)
    with pytest.raises(ConfigError) as error:
        full.grant(GIB)
    for part in ("80.0 GiB x gpu_memory_utilization 0.25 = 20.0", "hold 19.0", "needs 1.0"):
        assert part in str(error.value)


def test_blocks_asked_for_by_number_may_take_all_that_is_free() -> None:
    ACCOUNT.check(55 * GIB)
    with pytest.raises(ConfigError) as error:
        ACCOUNT.check(55 * GIB + 1)
    for part in ("num_kvcache_blocks asks for 55.00 GiB", "55.00 are left", "80.0 GiB, of which"):
        assert part in str(error.value)
    overdrawn = MemoryAccount(8 * GIB, 0.9, held=8 * GIB, step=GIB, graphs=GIB)
    with pytest.raises(ConfigError, match=r"but 0\.00 are left"):
        overdrawn.check(1)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("compiler", [None, "my-cc"])
def test_a_gpu_without_a_c_compiler_is_refused_at_the_start(
    num_ranks: int, compiler: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("nanovllm.devices.cuda.device.CudaDevice", lambda *_: None)
    monkeypatch.setattr(choose, "has_cuda", lambda: True)
    monkeypatch.setattr(ranks, "num_devices", lambda: num_ranks)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    config = EngineConfig("any", tensor_parallel_size=num_ranks)
    check = choose.create_device if num_ranks == 1 else ranks.check_devices
    with pytest.raises(ConfigError, match=f"needs a C compiler.*{compiler or 'gcc or clang'}"):
        check(config)
    (tmp_path / (compiler or "clang")).touch(0o755)
    check(config)
