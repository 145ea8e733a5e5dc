"""Choose the platform by name, once."""

from __future__ import annotations

from nanovllm.errors import ConfigError
from nanovllm.platforms.base import Platform
from nanovllm.platforms.cpu import CpuPlatform


def create_platform(device: str) -> Platform:
    if device not in ("auto", "cpu"):
        raise ConfigError(f"device must be 'auto' or 'cpu', got {device!r}")
    return CpuPlatform()
