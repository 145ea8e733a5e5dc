"""Compile the kernels that a function would launch, in parallel processes.

The function is run once with every launch suppressed. Each kernel it would launch is sent to a
process that compiles the kernel and its launcher into Triton's cache on disk. The first real launch
finds both there.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import constexpr, dtype
from triton.runtime import JITFunction, driver

from nanovllm.devices.cuda.kernels import elementwise

_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from nanovllm.devices.cuda.compile_ahead import serve; serve()"
)
# Absolute path of the folder that contains nanovllm; entries of sys.path may be relative.
_PACKAGES = Path(__file__).resolve().parents[3]

Kernels = SimpleQueue["str | None"]  # a JSON line per kernel; None marks the end


def is_first_use() -> bool:
    """Whether this process has not launched any kernel yet.

    `compile_ahead` needs this: launches of kernels that are already loaded cannot be suppressed,
    and these kernels would read inputs that suppressed kernels did not write.
    """
    norm = elementwise._rms_norm  # used by every model
    return isinstance(norm, JITFunction) and not norm.device_caches


def marker_path(*facts: object) -> Path:
    """Return the file in Triton's cache that marks all kernels for `facts` as compiled."""
    sources = sorted(_PACKAGES.glob("nanovllm/*/cuda/**/*.py"))
    times = [path.stat().st_mtime_ns for path in sources]
    digest = hashlib.sha256(repr((triton.__version__, times, facts)).encode()).hexdigest()
    return Path(knobs.cache.dir) / f"nanovllm-{digest[:16]}"


def compile_ahead(work: Callable[[], object], num_processes: int) -> None:
    """Compile the kernels that `work` would launch.

    `work` must not depend on the kernels' results, which stay uninitialized.
    """
    kernels: Kernels = SimpleQueue()
    processes: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(num_processes) as pool:
        try:
            for _ in range(num_processes):
                processes.append(_start_process())
                pool.submit(_feed, processes[-1], kernels)
            _collect(work, kernels)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        finally:
            for _ in processes:
                kernels.put(None)


def serve() -> None:
    """Main loop of a compiler process: compile the kernels that standard input describes."""
    has_gpu = torch.cuda.is_available()
    for line in sys.stdin:
        kernel = compile_kernel(*json.loads(line))
        if has_gpu:  # build the launcher, a C function for each signature
            driver.active.launcher_cls(kernel.src, kernel.metadata)
        print(flush=True)


def compile_kernel(
    module: str, name: str, key: str, target: list[Any], specialization: str
) -> CompiledKernel:
    """Compile a kernel from the data queued by `_collect`; the target GPU may be absent.

    `JITFunction.preload` does the same but needs the device. Triton's cache key depends on the keys
    computed earlier in the process, so the key comes from the process that will launch the kernel.
    """
    kernel, asked = getattr(importlib.import_module(module), name), json.loads(specialization)
    kernel.hash = key
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {key: _tuples(value) for key, value in asked["signature"].items()},
        _by_path(asked["constant_keys"], map(_constant, asked["constant_vals"])),
        _by_path(asked["attrs_keys"], asked["attrs_vals"]),
    )
    device = GPUTarget(*target)
    options = {key: _tuples(value) for key, value in asked["options"].items()}
    options = make_backend(device).parse_options(options).__dict__
    return triton.compile(source, target=device, options=options)


def _start_process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, *sys.path, str(_PACKAGES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C in the terminal interrupts only the engine
    )


def _feed(process: subprocess.Popen[str], kernels: Kernels) -> None:
    """Send kernels to a process one by one; if it dies, the other processes continue.

    A kernel that fails to compile is compiled again at its first launch, which reports the error.
    """
    with suppress(BrokenPipeError), process:
        assert process.stdin is not None
        assert process.stdout is not None
        while (line := kernels.get()) is not None:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            if not process.stdout.readline():
                return


def _collect(work: Callable[[], object], kernels: Kernels) -> None:
    """Run `work` in this thread with its launches suppressed, and queue each kernel once.

    Triton's JIT hook is process-wide, so `note` ignores launches from other threads.
    """
    device = driver.active.get_current_target()
    target = [device.backend, device.arch, device.warp_size]
    thread, seen = threading.get_ident(), set()

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        if threading.get_ident() != thread:
            return False
        specialization = compile["specialization_data"]
        if specialization not in seen:
            seen.add(specialization)
            key = fn.jit_function.cache_key
            kernels.put(json.dumps([fn.module, fn.name, key, target, specialization]))
        return True  # skips the compilation and hence the launch

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        work()
    finally:
        knobs.runtime.jit_cache_hook = before


def _by_path(paths: list[list[int]], values: Any) -> dict[tuple[int, ...], Any]:
    return dict(zip(map(tuple, paths), values, strict=True))


def _constant(value: Any) -> Any:
    if isinstance(value, dict) and "constexpr" in value:
        return constexpr(value["constexpr"])
    return dtype(value) if isinstance(value, str) and dtype.is_dtype(value) else _tuples(value)


def _tuples(value: Any) -> Any:
    """Turn lists from JSON back into tuples, as Triton expects."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
