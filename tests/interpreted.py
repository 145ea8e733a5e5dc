"""Run modules by Triton's interpreter: TRITON_INTERPRET=1 python -m tests.interpreted A,B ..."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from triton.runtime import interpreter


def main() -> None:
    del sys.argv[0]
    with patch.object(interpreter, "_patch_lang", patch_language_once(interpreter._patch_lang)):
        for module in sys.argv[0].split(","):
            runpy.run_module(module, run_name="__main__")


def patch_language_once(patch_language: Callable[[Any], object]) -> Callable[[Any], object]:
    """Leave the language patched; the interpreter patches it at each call of each device function.

    That is half of its time.
    """
    patched: set[int] = set()

    def patch_once(function: Any) -> object:
        if id(function.__globals__) not in patched:
            patch_language(function)
            patched.add(id(function.__globals__))
        return SimpleNamespace(restore=lambda: None)

    return patch_once


if __name__ == "__main__":
    main()
