"""Run modules in Triton's interpreter: TRITON_INTERPRET=1 python -m tests.interpreted A,B ..."""

from __future__ import annotations

import gc
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.language import core
from triton.runtime import interpreter


def main() -> None:
    del sys.argv[0]
    gc.freeze()  # otherwise the imported modules are visited again and again
    builder = interpreter.interpreter_builder
    # The check for overflow takes a quarter of the time, and its result is used only for debugging.
    options = replace(builder.options, sanitize_overflow=False)
    with (
        patch.object(builder, "options", options),
        patch.object(interpreter, "_patch_lang", patch_language_once(interpreter._patch_lang)),
        patch.object(interpreter, "_get_np_dtype", by_name(interpreter._get_np_dtype)),
        patch.object(interpreter, "_convert_float", round_to_fp8(interpreter._convert_float)),
        patch.object(
            interpreter.ReduceOps,
            "generic_reduce",
            by_slices(interpreter.ReduceOps.generic_reduce),
        ),
        patch.object(core.block_type, "__init__", describe_once(core.block_type.__init__)),
        patch.object(core.tensor, "__init__", shape_once(core.tensor.__init__)),
    ):
        for module in sys.argv[0].split(","):
            runpy.run_module(module, run_name="__main__")


def patch_language_once(patch_language: Callable[[Any], object]) -> Callable[[Any], object]:
    """Patch the language once per module.

    The interpreter patches it at each call of a device function, which takes half of its time.
    """
    patched: set[int] = set()

    def patch_once(function: Any) -> object:
        if id(function.__globals__) not in patched:
            patch_language(function)
            patched.add(id(function.__globals__))
        return SimpleNamespace(restore=lambda: None)

    return patch_once


def by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache the numpy type of each Triton type; the interpreter rebuilds a table each time."""
    found: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    return look_up


def round_to_fp8(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Round to FP8 as devices do; the interpreter loses the carry into the exponent."""

    def convert_float(values: Any, kind: Any, target: Any, rounding: Any) -> Any:
        if target.name != "fp8e4nv" or kind.name != "fp32":
            return convert(values, kind, target, rounding)
        codes = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).numpy()

    return convert_float


def by_slices(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Combine slices of the input, in the same order as the interpreter combines its elements."""

    def generic_reduce(self: Any, parts: Any) -> Any:
        if self.axis is None or self.keep_dims:
            return reduce(self, parts)

        def slices(i: int) -> list[Any]:
            return [self.to_tensor(x.handle.data.take(i, self.axis), x.dtype) for x in parts]

        total = slices(0)
        for i in range(1, parts[0].shape[self.axis]):
            total = self.combine_fn.fn(*total, *slices(i))
        return total

    return generic_reduce


def describe_once(init: Callable[..., None]) -> Callable[..., None]:
    """Create each block type once; creating it for each result takes a fifth of the time."""
    known: dict[Any, dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key], element_ty=element_ty)

    return init_block_type


def shape_once(init: Callable[..., None]) -> Callable[..., None]:
    """Compute the shape of each tensor type once, and share it between tensors."""
    known: dict[str, dict[str, Any]] = {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = vars(self).copy()
        vars(self).update(known[type.name], handle=handle, type=type, dtype=type.scalar)

    return init_tensor


if __name__ == "__main__":
    main()
