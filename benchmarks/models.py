"""Configs of well-known models by name, so that nothing needs to be downloaded."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"


def model_names() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def model_path(model: str) -> str:
    """Return the config file of a known name; return a folder, file or hub id unchanged."""
    name = model.lower()
    return str(CONFIGS / f"{name}.json") if name in model_names() else model
