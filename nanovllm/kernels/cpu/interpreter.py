"""The loop that runs a program, a list of kernels, on every thread: compiled by numba, and kept."""

from __future__ import annotations

import logging
import zlib
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numba import cfunc, int64, types, uint8
from numba.core import event

from nanovllm.kernels.cpu.kernels import (
    PROGRAM_WIDTH,
    attend,
    rope_write,
    run_any_instruction,
    run_instruction,
)
from nanovllm.kernels.cpu.simd import FAST, call, pointer_to

logger = logging.getLogger(__name__)
Element = Literal["float32", "bfloat16"]
# Of kernels that are compiled apart: arguments, thread, number of threads.
CALL_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64)
SOURCES = ("kernels", "experts", "simd", "cache_rows")  # of what the interpreter calls


def compile_interpreter(element: Element, has_experts: bool) -> Any:
    """Return a C function that runs a program; every thread of a team calls it.

    Its argument points to int64: the program's address, its number of instructions, into how many
    parts each kernel is split, whichever threads run them, then the addresses of OpenMP's functions
    for the thread's number, the number of threads, and a barrier (or zeros).
    """
    sources = hash_sources(*SOURCES)
    like = like_of(element)

    def interpret(header):  # type: ignore[no-untyped-def]
        # `sources` is enclosed only so that a changed kernel file misses the cache, which looks at
        # this file and at what the function encloses.
        program, num_instructions = pointer_to(header[0], int64(0)), header[1] + 0 * sources
        num_parts, thread, num_threads = header[2], int64(0), int64(1)
        if header[3] != 0:
            thread, num_threads = int64(call(header[3])), int64(call(header[4]))
        for row in range(num_instructions):
            for i in range(thread, num_parts, num_threads):
                if has_experts:
                    run_any_instruction(program, row * PROGRAM_WIDTH, i, num_parts, like)
                else:
                    run_instruction(program, row * PROGRAM_WIDTH, i, num_parts, like)
            if num_threads > 1 and row + 1 < num_instructions:
                call(header[5])

    what = f"CPU kernels for {element}{' with experts' * has_experts}: 10 to 30"
    signature = types.void(types.CPointer(types.int64))
    return compile_kept(interpret, signature, what, warns=not has_experts)  # those come second


class Fp8CacheKernels:
    """Addresses of the kernels that write and read a KV cache in FP8, for programs to call."""

    def __init__(self, element: Element) -> None:
        self._attend, self._rope_write = compile_attend(element), compile_rope_write(element)
        self.attend: int = self._attend.address
        self.rope_write: int = self._rope_write.address


def compile_attend(element: Element) -> Any:
    like, sources = like_of(element), hash_sources(*SOURCES)

    def attend_codes(args, thread, num_threads):  # type: ignore[no-untyped-def]
        attend(args, 0 * sources, thread, num_threads, like, uint8(0))

    what = f"CPU attention over a cache of eight bits for {element}: 2 to 10"
    return compile_kept(attend_codes, CALL_SIGNATURE, what)


def compile_rope_write(element: Element) -> Any:
    like, sources = like_of(element), hash_sources(*SOURCES)

    def write_codes(args, thread, num_threads):  # type: ignore[no-untyped-def]
        rope_write(args, 0 * sources, thread, num_threads, like, uint8(0))

    what = f"CPU kernel that writes a cache of eight bits for {element}: 2 to 10"
    return compile_kept(write_codes, CALL_SIGNATURE, what)


def like_of(element: Element) -> Any:
    """A number of the type that elements are read as: of bfloat16 its bits."""
    return np.uint16(0) if element == "bfloat16" else np.float32(0)


def compile_kept(function: Any, signature: Any, what: str, warns: bool = False) -> Any:
    """Compile a C function, or load what was kept; `warns` where it cannot be kept.

    `what` ends in the number of seconds that it takes.
    """
    compile_function = partial(cfunc, signature, fastmath=FAST, error_model="numpy")
    with event.install_listener("numba:compile", AnnounceOnce(what)):
        try:
            return compile_function(cache=True)(function)
        except (RuntimeError, OSError) as error:  # no folder that can be written
            if warns:
                logger.warning(
                    "The machine code of the CPU kernels cannot be kept (%s), so that every start "
                    "compiles it anew: set NUMBA_CACHE_DIR to a folder that can be written",
                    error,
                )
            return compile_function()(function)


class AnnounceOnce(event.Listener):
    """Says what the wait is for, if there is one: machine code that was kept is loaded at once."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.is_said = False

    def on_start(self, event: Any) -> None:
        if not self.is_said:
            self.is_said = True
            # A warning, as Python shows those of a script too, which else waits in silence.
            logger.warning("Compiling the %s seconds, once on this machine", self.what)

    def on_end(self, event: Any) -> None:
        pass


def hash_sources(*names: str) -> int:
    """A number that changes with the code of the kernels."""
    files = [Path(__file__).with_name(f"{name}.py") for name in names]
    return zlib.crc32(b"".join(file.read_bytes() for file in files))
