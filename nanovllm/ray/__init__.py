"""Integration with Ray Data and Ray Serve; needs `pip install "nanovllm[ray]"`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.ray.predictor import Predictor
    from nanovllm.ray.ray_serve import build_app

__all__ = ["Predictor", "build_app"]

_MODULES = {"Predictor": "nanovllm.ray.predictor", "build_app": "nanovllm.ray.ray_serve"}


def __getattr__(name: str) -> object:
    """Import a public name on first access: Predictor does not need Ray Serve."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
