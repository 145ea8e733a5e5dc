"""The kernels that write and read a cache of e4m3 codes, compiled when an engine has one."""

from __future__ import annotations

from typing import Any

from numba import types, uint8

from nanovllm.kernels.cpu.interpreter import SOURCES, Element, compile_kept, hash_sources, like_of
from nanovllm.kernels.cpu.kernels import attend, rope_write

SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64)


class Fp8CacheKernels:
    """Their addresses, for programs to call."""

    def __init__(self, element: Element) -> None:
        self._attend, self._rope_write = compile_attend(element), compile_rope_write(element)
        self.attend: int = self._attend.address
        self.rope_write: int = self._rope_write.address


def compile_attend(element: Element) -> Any:
    like, sources = like_of(element), hash_sources(*SOURCES)

    def attend_codes(args, thread, num_threads):  # type: ignore[no-untyped-def]
        attend(args, 0 * sources, thread, num_threads, like, uint8(0))

    what = f"CPU attention over a cache of eight bits for {element}: 2 to 10"
    return compile_kept(attend_codes, SIGNATURE, what)


def compile_rope_write(element: Element) -> Any:
    like, sources = like_of(element), hash_sources(*SOURCES)

    def write_codes(args, thread, num_threads):  # type: ignore[no-untyped-def]
        rope_write(args, 0 * sources, thread, num_threads, like, uint8(0))

    what = f"CPU kernel that writes a cache of eight bits for {element}: 2 to 10"
    return compile_kept(write_codes, SIGNATURE, what)
