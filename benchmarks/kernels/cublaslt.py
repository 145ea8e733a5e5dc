"""ctypes bindings to the cuBLASLt that torch has loaded; the caller chooses the algorithm."""

from __future__ import annotations

import ctypes
from ctypes import (
    byref,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_RESULTS = 256
WORKSPACE_BYTES = 64 << 20
# Constants of cublasLt.h and library_types.h.
TYPES = {torch.bfloat16: 14, torch.float32: 0}
COMPUTE_32F = 68
TRANSPOSE_A = 3  # attribute of a matmul descriptor
MAX_WORKSPACE = 1  # attribute of the preferences
TILE_IDS = 6  # capability of an algorithm
NO_REDUCTION, SUMS_IN_FLOAT32 = 0, 2


class Setting(NamedTuple):
    """A configuration attribute of an algorithm."""

    number: int
    kind: type[c_uint16] | type[c_uint32] = c_uint32


SETTINGS = {
    "id": Setting(0),
    "tile": Setting(1),
    "splits": Setting(2),
    "reduction": Setting(3),
    "swizzling": Setting(4),
    "custom": Setting(5),
    "stages": Setting(6),
    "cluster": Setting(8, c_uint16),
}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: plain data, valid for the same library version."""

    _fields_ = (("data", c_uint64 * 8),)

    def __bytes__(self) -> bytes:
        return ctypes.string_at(byref(self), sizeof(self))


class Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasLt:
    """The library, its handle, and a workspace shared by consecutive products."""

    def __init__(self) -> None:
        assert torch.version.cuda is not None
        self.calls = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        self.calls.cublasLtGetVersion.restype = c_size_t
        self.version = int(self.calls.cublasLtGetVersion())
        self.handle = c_void_p()
        check(self.calls.cublasLtCreate(byref(self.handle)))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


@dataclass(frozen=True, slots=True)
class ProductShape:
    num_rows: int
    num_out: int
    num_in: int
    out_dtype: torch.dtype = torch.bfloat16
    adds: bool = False  # accumulate into y


class Product:
    """Computes y [rows, out] = x [rows, in] @ weight [out, in].t(), or adds the product to y.

    In the library's column-major order these are y [out, rows], x [in, rows], weight [in, out].
    """

    def __init__(self, library: CublasLt, shape: ProductShape) -> None:
        self.library, self.shape = library, shape
        calls, bf16, kind = library.calls, TYPES[torch.bfloat16], TYPES[shape.out_dtype]
        self.operation = c_void_p()
        check(
            calls.cublasLtMatmulDescCreate(byref(self.operation), COMPUTE_32F, TYPES[torch.float32])
        )
        is_transposed = c_int32(1)
        check(
            calls.cublasLtMatmulDescSetAttribute(
                self.operation, TRANSPOSE_A, byref(is_transposed), c_size_t(4)
            )
        )
        num_rows, num_out, num_in = shape.num_rows, shape.num_out, shape.num_in
        self.weight = self._layout(bf16, num_in, num_out)
        self.x = self._layout(bf16, num_in, num_rows)
        self.y = self._layout(kind, num_out, num_rows)
        self._one, self._beta = c_float(1.0), c_float(1.0 if shape.adds else 0.0)
        self._run = calls.cublasLtMatmul

    def __call__(self, algorithm: Algorithm, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        place = c_void_p(y.data_ptr())
        workspace = self.library.workspace
        check(
            self._run(
                *(self.library.handle, self.operation, byref(self._one)),
                *(c_void_p(weight.data_ptr()), self.weight, c_void_p(x.data_ptr()), self.x),
                *(byref(self._beta), place, self.y, place, self.y, byref(algorithm)),
                *(c_void_p(workspace.data_ptr()), c_size_t(workspace.nbytes)),
                c_void_p(torch.cuda.current_stream().cuda_stream),
            )
        )
        return y

    def proposed(self) -> list[Algorithm]:
        """Return the algorithms that the library's heuristic proposes, best first."""
        calls, preference = self.library.calls, c_void_p()
        check(calls.cublasLtMatmulPreferenceCreate(byref(preference)))
        most = c_uint64(WORKSPACE_BYTES)
        check(
            calls.cublasLtMatmulPreferenceSetAttribute(
                preference, MAX_WORKSPACE, byref(most), c_size_t(8)
            )
        )
        found, count = (Found * MAX_RESULTS)(), c_int()
        check(
            calls.cublasLtMatmulAlgoGetHeuristic(
                *(self.library.handle, self.operation, self.weight, self.x, self.y, self.y),
                *(preference, MAX_RESULTS, found, byref(count)),
            )
        )
        check(calls.cublasLtMatmulPreferenceDestroy(preference))
        return [
            Algorithm.from_buffer_copy(one.algorithm)
            for one in found[: count.value]
            if one.state == 0
        ]

    def changed(self, algorithm: Algorithm, **settings: int) -> Algorithm | None:
        """Return the algorithm with these settings changed, or None if it does not support them."""
        changed, found = Algorithm.from_buffer_copy(algorithm), Found()
        for name, value in settings.items():
            number, kind = SETTINGS[name]
            held, set_one = kind(value), self.library.calls.cublasLtMatmulAlgoConfigSetAttribute
            if set_one(byref(changed), number, byref(held), c_size_t(sizeof(held))):
                return None
        status = self.library.calls.cublasLtMatmulAlgoCheck(
            *(self.library.handle, self.operation, self.weight, self.x, self.y, self.y),
            *(byref(changed), byref(found)),
        )
        fits = status == 0 and found.state == 0 and found.workspace_bytes <= WORKSPACE_BYTES
        return changed if fits else None

    def with_splits(self, algorithm: Algorithm, num_splits: int) -> Algorithm | None:
        reduction = NO_REDUCTION if num_splits == 1 else SUMS_IN_FLOAT32
        return self.changed(algorithm, splits=num_splits, reduction=reduction)

    def tiles(self, algorithm: Algorithm) -> list[int]:
        """Return the tile sizes that an algorithm supports, as enum values of cublasLt.h."""
        tiles, size = (c_uint32 * 1024)(), c_size_t()
        read = self.library.calls.cublasLtMatmulAlgoCapGetAttribute
        check(read(byref(algorithm), TILE_IDS, tiles, c_size_t(sizeof(tiles)), byref(size)))
        return list(tiles[: size.value // sizeof(c_uint32)])

    def describe(self, algorithm: Algorithm) -> dict[str, int]:
        values = {}
        for name, (number, kind) in SETTINGS.items():
            value, size = kind(), c_size_t()
            read = self.library.calls.cublasLtMatmulAlgoConfigGetAttribute
            read(byref(algorithm), number, byref(value), c_size_t(sizeof(value)), byref(size))
            values[name] = value.value
        return values

    def _layout(self, kind: int, num_in: int, num_out: int) -> c_void_p:
        layout = c_void_p()
        create = self.library.calls.cublasLtMatrixLayoutCreate
        check(
            create(byref(layout), kind, c_uint64(num_in), c_uint64(num_out), ctypes.c_int64(num_in))
        )
        return layout


def check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")
