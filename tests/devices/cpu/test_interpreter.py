"""Compilation logs a warning, happens once, and works without a writable cache folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

import numba
import torch
from numba.core import caching

from nanovllm.devices.cpu.kernels import interpreter
from nanovllm.devices.cpu.kernels.intrinsics import kernel


@kernel
def quickly_compiled(args: Any, thread: int, num_threads: int, like: Any) -> None:
    pass


@pytest.fixture
def compile_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Any:
    """Act like a new process with an empty cache."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, logger=interpreter.__name__)

    def compile_some() -> list[Any]:
        compiler = interpreter.Compiler()
        dtypes = torch.float32, torch.bfloat16
        return [interpreter.compile_kernel(compiler, quickly_compiled, dtype) for dtype in dtypes]

    return compile_some


def test_only_the_first_compilation_takes_long_and_says_so(
    compile_anew: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert all(compiled.address for compiled in compile_anew())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Compiling the CPU kernels" in caplog.text
    assert list(tmp_path.rglob("*.nbi"))
    caplog.clear()
    assert [compiled.cache_hits for compiled in compile_anew()] == [1, 1]
    assert not caplog.records


@pytest.mark.parametrize("fault", ["no folder", "full disk"])
def test_without_a_cache_folder_it_compiles_and_says_what_to_set(
    compile_anew: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if fault == "no folder":
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(caching.FunctionCache, "_save_overload", fail)
    assert all(compiled.address for compiled in compile_anew())
    *announced, warning = caplog.records  # no warning for kernels that this process has compiled
    assert all("Compiling" in record.getMessage() for record in announced)
    assert warning.levelname == "WARNING"
    assert "NUMBA_CACHE_DIR" in warning.getMessage()


def test_machine_code_goes_by_the_text_of_every_kernel() -> None:
    """numba's own cache key covers only the interpreter's file."""
    folder = Path(interpreter.__file__).parent
    with_kernels = {
        path.stem
        for path in folder.glob("*.py")
        if any(name in path.read_text() for name in ("@kernel", "@inlined", "@intrinsic"))
    }
    assert with_kernels | {"block_types"} == set(interpreter.SOURCES)
