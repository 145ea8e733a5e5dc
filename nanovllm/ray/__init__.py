"""nanovllm on a Ray cluster: needs `pip install "nanovllm[ray]"`, which nothing else imports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.ray.predictor import Predictor
    from nanovllm.ray.ray_serve import build_app

__all__ = ["Predictor", "build_app"]

_HOMES = {"Predictor": "nanovllm.ray.predictor", "build_app": "nanovllm.ray.ray_serve"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: not all of them need all of Ray."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
