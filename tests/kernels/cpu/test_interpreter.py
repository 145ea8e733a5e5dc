"""Compiling says that it takes a while, happens once, and needs no folder to keep its result."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

import numba
from numba.core import caching

from nanovllm.kernels.cpu import block_kernels, interpreter
from nanovllm.kernels.cpu.simd import kernel, part


@kernel
def _noop(args: Any, at: int) -> None:
    pass


@part
def _run_quickly_compiled(args: Any, at: int, thread: int, num_threads: int, like: Any) -> None:
    _noop(args, at)


@pytest.fixture
def compile_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Any:
    """What a new process would do, with kernels that compile quickly and an empty cache."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(interpreter, "run_instruction", _run_quickly_compiled)
    caplog.set_level(logging.INFO, logger=interpreter.__name__)
    return lambda: interpreter.compile_interpreter("float32", False)


def test_only_the_first_compilation_takes_long_and_says_so(
    compile_anew: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert compile_anew().address
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Compiling the CPU kernels for float32" in caplog.text
    assert list(tmp_path.rglob("*.nbi"))
    caplog.clear()
    assert compile_anew().cache_hits == 1
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
    assert compile_anew().address
    *announced, warning = caplog.records  # nothing is announced that this process has compiled
    assert all("Compiling" in record.getMessage() for record in announced)
    assert warning.levelname == "WARNING"
    assert "NUMBA_CACHE_DIR" in warning.getMessage()


def test_machine_code_goes_by_the_text_of_every_kernel() -> None:
    """numba itself looks at the file of the interpreter alone."""
    folder = Path(interpreter.__file__).parent
    with_kernels = {
        path.stem
        for path in folder.glob("*.py")
        if any(name in path.read_text() for name in ("@kernel", "@part", "@intrinsic"))
    }
    apart = set(block_kernels.SOURCES) - {"simd"}
    assert with_kernels | apart == {*interpreter.SOURCES, *apart}
    assert "simd" in block_kernels.SOURCES
