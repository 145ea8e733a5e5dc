"""Models by name: the shapes of well-known ones, so that nothing need be downloaded."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"


def model_names() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def model_path(model: str) -> str:
    """Return the config file of a known name; a folder, a file or a hub id stays as it is."""
    name = model.lower()
    return str(CONFIGS / f"{name}.json") if name in model_names() else model
