"""nanovllm on a Ray cluster; needs `pip install nanovllm[ray]`, which nothing else imports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.ray.serve import build_app

__all__ = ["build_app"]

_HOMES = {"build_app": "nanovllm.ray.serve"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
