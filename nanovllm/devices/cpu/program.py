"""Run kernels on torch's own OpenMP threads, immediately or as a captured program."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.devices.cpu.contention import ThreadChooser
from nanovllm.devices.cpu.kernels.interpreter import (
    PROGRAM_WIDTH,
    Compiler,
    compile_interpreter,
    compile_kernel,
)


class NotCapturableError(Exception):
    """A captured function computes outside our kernels; a replay would omit that computation."""


class _RefuseCompute:
    """Rejects operations that compute; views and empty tensors remain valid in a replay.

    This is a separate base class because torch wraps the __torch_dispatch__ of a TorchDispatchMode
    in a function that imports torch's compiler, which takes seconds.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returned = func._schema.returns[0].alias_info if func._schema.returns else None
        is_view = returned is not None and not returned.is_write
        if not is_view and not func._schema.name.startswith("aten::empty"):
            raise NotCapturableError(f"{func} cannot be captured: it is not one of our kernels")
        return func(*args, **(kwargs or {}))


class OnlyViews(_RefuseCompute, TorchDispatchMode):
    pass


class Program:
    """A sequence of kernel calls, and the tensors that they point to."""

    def __init__(self, instructions: np.ndarray, tensors: list[Tensor], pool: ThreadPool) -> None:
        self.instructions = instructions
        self._tensors = tensors  # the instructions hold only their addresses
        self._pool = pool
        sizes = len(instructions), pool.num_threads
        self._header = np.array([instructions.ctypes.data, *sizes, *pool.openmp_calls], np.int64)
        self._address = self._header.ctypes.data

    def run(self) -> None:
        """Run the kernels on the chosen number of threads, which does not change the results."""
        self._pool.run(self._address)


class ThreadPool:
    """Runs programs on torch's OpenMP threads; a second pool would compete with them for cores."""

    def __init__(self, compiler: Compiler, chooser: ThreadChooser | None) -> None:
        self._interpreter = compile_interpreter(compiler)
        openmp = find_openmp()
        self._start_threads = None if openmp is None else openmp.GOMP_parallel
        self.num_threads = 1 if openmp is None else torch.get_num_threads()
        names = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
        self.openmp_calls = [
            0 if openmp is None else ctypes.cast(getattr(openmp, name), ctypes.c_void_p).value
            for name in names
        ]
        self._function = ctypes.c_void_p(self._interpreter.address)
        self.chooser = chooser or ThreadChooser(self.num_threads)

    def run(self, header_address: int) -> None:
        header = ctypes.c_void_p(header_address)
        if self._start_threads is None:
            self._interpreter.ctypes(ctypes.cast(header, ctypes.POINTER(ctypes.c_int64)))
        else:
            self._start_threads(self._function, header, self.chooser.num_threads, 0)


Argument = Tensor | int | None  # kernels get the address of a tensor, and 0 for None


@dataclass(frozen=True, slots=True)
class Capture:
    """A program that is being captured."""

    instructions: list[tuple[int, ...]]
    tensors: list[Tensor]


class Launcher:
    """Runs kernels when they are launched, or records them while `capture` runs a function."""

    def __init__(self, dtype: torch.dtype, chooser: ThreadChooser | None = None) -> None:
        self.dtype = dtype
        self.compiler = Compiler()
        self._pool = ThreadPool(self.compiler, chooser)
        self.num_threads = self._pool.num_threads
        self.chooser = self._pool.chooser
        self._single = Program(np.zeros((1, PROGRAM_WIDTH), np.int64), [], self._pool)
        self._scratch = torch.empty(0)
        self._kernels: dict[tuple[Any, torch.dtype | None], Any] = {}
        self._capture: Capture | None = None

    def launch(self, kernel: Any, *args: Argument, other: torch.dtype | None = None) -> None:
        """Run a kernel, compiling it on first use.

        `other` is the dtype of the KV cache or of the output, if the kernel has such a parameter.
        """
        key = kernel, other
        if key not in self._kernels:
            dtypes = [self.dtype] if other is None else [self.dtype, other]
            self._kernels[key] = compile_kernel(self.compiler, kernel, *dtypes)
        self.call(self._kernels[key].address, *args)

    def call(self, address: int, *args: Argument) -> None:
        """Run the compiled kernel at an address, or record the call during a capture."""
        # isinstance(arg, Tensor) would be slower, and this runs several times per layer.
        integers = [
            arg if isinstance(arg, int) else 0 if arg is None else arg.data_ptr() for arg in args
        ]
        if self._capture is not None:
            self._capture.instructions.append((address, *integers))
            self._capture.tensors.extend(arg for arg in args if isinstance(arg, Tensor))
            return
        self._single.instructions[0, : 1 + len(integers)] = (address, *integers)
        self._single.run()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate the output of a kernel."""
        return torch.empty(shape, dtype=dtype or self.dtype)

    def scratch(self, size: int) -> Tensor:
        """Return float32 scratch memory for the next kernel; later kernels may overwrite it."""
        if len(self._scratch) < size:
            self._scratch = torch.empty(2 * size, dtype=torch.float32)
        return self._scratch

    def capture(self, function: Callable[[], Tensor]) -> tuple[Program, Tensor]:
        """Capture a function that only launches kernels; return the program and its output tensor.

        Each run of the program overwrites the output.
        """
        capture = self._capture = Capture([], [])
        try:
            with OnlyViews():
                output = function()
        finally:
            self._capture = None
        instructions = np.zeros((len(capture.instructions), PROGRAM_WIDTH), np.int64)
        for i, instruction in enumerate(capture.instructions):
            instructions[i, : len(instruction)] = instruction
        return Program(instructions, capture.tensors, self._pool), output


def find_openmp() -> ctypes.CDLL | None:
    """Return a handle to torch's OpenMP library; None if it lacks the GNU interface."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "GOMP_parallel") and hasattr(library, "GOMP_barrier"):
            return library
    return None


def float_bits(value: float) -> int:
    """Return the bits of `value` as a float32; programs pass floats as integers."""
    return int(np.float32(value).view(np.uint32))
