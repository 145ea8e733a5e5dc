"""Compile and cache the kernels, and the interpreter, which runs a program of kernel calls."""

from __future__ import annotations

import logging
import zlib
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba import cfunc, int64, types
from numba.core import event

from nanovllm.devices.cpu.kernels.intrinsics import FAST, call, call_kernel, pointer_to
from nanovllm.ops.fp8 import FP8

logger = logging.getLogger(__name__)
PROGRAM_WIDTH = 32  # int64 values per instruction: the address of a kernel, then its arguments
# Parameters: a pointer to the kernel's arguments, the index of the part to compute, and the number
# of parts.
KERNEL_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64)
SOURCES = (
    *("dense", "delta_net", "experts", "intrinsics", "simd", "cache_rows"),
    *("block_kernels", "block_types"),
)
# Zero of the NumPy type used to load each dtype; bfloat16 and FP8 are loaded as raw bits.
ZERO_OF = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0), FP8: np.uint8(0)}


class Compiler(event.Listener):
    """Compiles Python functions with numba's cfunc, or loads them from numba's cache.

    It logs a warning before the first compilation.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()

    def compile(self, function: Any, signature: Any = KERNEL_SIGNATURE) -> Any:
        compile_function = partial(cfunc, signature, fastmath=FAST, error_model="numpy")
        with event.install_listener("numba:compile", self):
            try:
                return compile_function(cache=True)(function)
            except (RuntimeError, OSError) as error:  # no writable cache folder
                self._warn_once(
                    "The compiled CPU kernels cannot be cached (%s), so every start compiles them "
                    "again; set NUMBA_CACHE_DIR to a writable folder",
                    error,
                )
                return compile_function()(function)

    def on_start(self, event: Any) -> None:
        # Logged as a warning, which Python shows even if a script does not configure logging.
        self._warn_once("Compiling the CPU kernels; this takes 10 to 60 seconds, once per machine")

    def on_end(self, event: Any) -> None:
        pass

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message, *values)


def compile_interpreter(compiler: Compiler) -> Any:
    """Compile the interpreter, a C function that every thread of the pool calls to run a program.

    Its argument points to int64 values: the address of the program, its number of instructions, the
    number of parts that each kernel is divided into (which may differ from the number of threads),
    and the addresses of three OpenMP functions, or zeros: thread number, number of threads, and
    barrier.
    """

    def interpret(header):  # type: ignore[no-untyped-def]
        program, num_instructions = pointer_to(header[0], int64(0)), header[1]
        num_parts, thread, num_threads = header[2], int64(0), int64(1)
        if header[3] != 0:
            thread, num_threads = int64(call(header[3])), int64(call(header[4]))
        for row in range(num_instructions):
            first = row * PROGRAM_WIDTH
            for i in range(thread, num_parts, num_threads):
                call_kernel(program[first], program, first + 1, i, num_parts)
            if num_threads > 1 and row + 1 < num_instructions:
                call(header[5])

    return compiler.compile(interpret, types.void(types.CPointer(types.int64)))


def compile_kernel(compiler: Compiler, kernel: Any, *dtypes: torch.dtype) -> Any:
    """Compile a kernel to a C function for these element dtypes."""
    version = hash_sources(kernel.__name__)
    zeros = tuple(ZERO_OF[dtype] for dtype in dtypes)

    def run(args, thread, num_threads):  # type: ignore[no-untyped-def]
        # numba's on-disk cache is keyed by this file and the closure variables. Referring to
        # `version` (times 0) changes the key whenever a kernel source changes. The kernel is a
        # global: a closure variable would add its identity, which differs between processes, to the
        # key.
        kernel_function(args, thread + 0 * version, num_threads, *zeros)  # type: ignore[name-defined]  # noqa: F821

    names = {**globals(), "kernel_function": kernel}
    return compiler.compile(FunctionType(run.__code__, names, closure=run.__closure__))


def hash_sources(name: str = "") -> int:
    """Return a hash of the kernels' source code and of a kernel's name."""
    files = [Path(__file__).with_name(f"{source}.py") for source in SOURCES]
    return zlib.crc32(b"".join([name.encode(), *(file.read_bytes() for file in files)]))
