"""Compile the kernels of some work in several processes at once, before the work is done.

The work is run with every launch left out. What would be launched is sent to processes that compile
it into Triton's cache on disk, and what launches it too, where the first launch finds both.
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
_PACKAGES = Path(__file__).resolve().parents[3]  # where ours is, should the path be relative

Kernels = SimpleQueue["str | None"]  # lines of JSON; None: the end


def is_first_use() -> bool:
    """Whether no kernel was launched in this process yet.

    Later, some would be found compiled and be launched, on what the others have not computed.
    """
    norm = elementwise._rms_norm  # which every model uses
    return isinstance(norm, JITFunction) and not norm.device_caches


def stamp_path(*facts: object) -> Path:
    """A file in Triton's cache that tells that everything for such work is compiled."""
    sources = sorted(_PACKAGES.glob("nanovllm/*/cuda/**/*.py"))
    times = [path.stat().st_mtime_ns for path in sources]
    digest = hashlib.sha256(repr((triton.__version__, times, facts)).encode()).hexdigest()
    return Path(knobs.cache.dir) / f"nanovllm-{digest[:16]}"


def compile_ahead(work: Callable[[], object], num_processes: int) -> None:
    """Compile what `work` would launch; its results are garbage, so it must not depend on them."""
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
    """Compile what standard input asks for, in a process of its own."""
    is_here = torch.cuda.is_available()
    for line in sys.stdin:
        kernel = compile_kernel(*json.loads(line))
        if is_here:  # Triton has a C compiler build a function for every signature
            driver.active.launcher_cls(kernel.src, kernel.metadata)
        print(flush=True)


def compile_kernel(
    module: str, name: str, key: str, target: list[Any], specialization: str
) -> CompiledKernel:
    """Compile a kernel for a device that need not be here, from what Triton tells its hooks.

    This is `JITFunction.preload`, which needs the device. The key under which Triton caches what it
    compiles depends on which keys it computed before, so it comes from where the launch will be.
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
        start_new_session=True,  # Ctrl-C at the terminal is for the engine alone
    )


def _feed(process: subprocess.Popen[str], kernels: Kernels) -> None:
    """Have a process compile one kernel after the other; if it fails, the others go on.

    A kernel that does not compile is compiled again at its first launch, which tells why.
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
    """Run `work` in this thread without its launches, and note each kernel once.

    Triton has one set of hooks for a process, so ours leaves other threads' launches alone.
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
        return True  # do not compile, and hence do not launch

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
    """JSON has no tuples, and Triton no lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
