"""Other processes compile kernels, for a device that may be absent."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import GPUTarget

from nanovllm.devices.cuda import compile_ahead
from nanovllm.devices.cuda.kernels import sampling

POINTERS = "out", "slots", "context_lens", "tokens", "lengths"
NUMBERS = "stride", "num_rows", "num_slots"
ADVANCE = {  # what Triton passes to its hook when _advance_kernel is launched
    "signature": {
        **dict.fromkeys(POINTERS, "*i32"),
        **dict.fromkeys((*NUMBERS, "width"), "i32"),
        "BLOCK": "constexpr",
    },
    "constant_keys": [[9]],
    "constant_vals": [256],
    "attrs_keys": [[0], [1]],
    "attrs_vals": [[["tt.divisibility", 16]]] * 2,
    "options": {"num_warps": 4, "extern_libs": []},
}


def launch(specialization: dict[str, Any]) -> bool | None:
    """Call the hook as Triton does; return True if the launch is suppressed."""
    hook: Any = knobs.runtime.jit_cache_hook
    kernel = sampling._advance_kernel
    name, module = kernel.fn.__qualname__, sampling.__name__
    fn = SimpleNamespace(module=module, name=name, jit_function=kernel)
    told = {"specialization_data": json.dumps(specialization)}
    is_left_out: bool | None = hook(fn=fn, compile=told)
    return is_left_out


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    active = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(compile_ahead, "driver", SimpleNamespace(active=active))
    return tmp_path


@pytest.mark.slow
def test_what_work_would_launch_is_compiled_once(cache: Path, capfd: Any) -> None:
    """A process that fails does not delay the others."""
    told: list[bool | None] = []

    def work() -> None:
        for _ in range(3):
            told.append(launch(ADVANCE))
        for num_warps in (3, 5, 7):  # invalid: compilation fails
            launch({**ADVANCE, "options": {"num_warps": num_warps}})
        other = threading.Thread(target=lambda: told.append(launch(ADVANCE)))
        other.start()
        other.join()

    compile_ahead.compile_ahead(work, num_processes=1)
    assert told == [True, True, True, False]
    assert "num_warps must be a power of 2" in capfd.readouterr().err
    assert [path.name for path in cache.rglob("*.cubin")] == ["_advance_kernel.cubin"]
    assert knobs.runtime.jit_cache_hook is None


@pytest.mark.slow
def test_kernels_are_found_by_the_key_of_this_process(cache: Path, monkeypatch: Any) -> None:
    """The key may differ in the other process, where Triton computes keys in another order."""
    monkeypatch.setattr(sampling._advance_kernel, "hash", "another key")
    compile_ahead.compile_ahead(lambda: launch(ADVANCE), num_processes=1)
    hits = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)
    )
    for key in ("another key", "a third"):
        told = [sampling.__name__, "_advance_kernel", key, ["cuda", 90, 32], json.dumps(ADVANCE)]
        compile_ahead.compile_kernel(*told)
    assert hits == [True, False]


def test_an_error_of_the_work_is_raised(cache: Path) -> None:
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compile_ahead.compile_ahead(work, num_processes=2)
    assert knobs.runtime.jit_cache_hook is None


def test_stamps_differ_by_what_they_stand_for() -> None:
    stamps = {compile_ahead.marker_path(*facts) for facts in ((1, 2), (1, 3), (1, 2))}
    assert len(stamps) == 2
