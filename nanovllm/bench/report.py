"""Results: a line to read, and a line of JSON to keep."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nanovllm.bench.floors import Rates
from nanovllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setup:
    """What a number is worth nothing without."""

    model: str
    device: str
    dtype: str
    rates: Rates | None  # None: no floor is known
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"

    def heading(self) -> str:
        rows = {
            "model": f"{self.model}, {self.dtype}, {self.kv_cache_dtype} KV cache",
            "device": f"{self.device}, {versions_text()}{', eager' if self.enforce_eager else ''}",
            "floor": f"at {self.rates}" if self.rates else "not known: see --bandwidth, --tflops",
        }
        return "\n".join(f"{name:<14}{value}" for name, value in rows.items())


@dataclass(frozen=True, slots=True)
class Result:
    case: str  # what was measured: "nano", "bs64", "prefill", ...
    unit: str  # "tok/s": more is better; "ms" or "ms/step": less is
    runs: list[float]
    floor: float | None
    first_token_ms: float

    def line(self) -> str:
        value = statistics.median(self.runs)
        parts = [f"{self.case:<14}{number(value):>9} {self.unit:<8}"]
        if self.floor is not None:
            share = value / self.floor if self.unit == "tok/s" else self.floor / value
            parts.append(f"floor {number(self.floor):>7} ({share:.0%} of what is possible)")
        parts.append(f"runs {' '.join(map(number, self.runs))}")
        if self.unit != "ms":
            parts.append(f"first token after {number(self.first_token_ms)} ms")
        return "   ".join(parts)


def keep(
    path: str | None, *, case: str, unit: str, runs: list[float], floor: float | None, **others: Any
) -> None:
    """Append a result to a file, if there is one, as a line of JSON: all benchmarks write these."""
    if path is not None:
        record = {"case": case, "unit": unit, "runs": runs, "value": statistics.median(runs)}
        record |= {"floor": floor, **others, "versions": installed()}
        _append(path, json.dumps(record) + "\n")


def check_writable(path: str | None) -> None:
    """A file that cannot be written is better known before a measurement than after it."""
    if path is not None:
        _append(path, "")


def _append(path: str, text: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write results to {path}: {error.strerror}") from error


def number(value: float) -> str:
    """Three digits or more: 0.453, 12.3, 31,821."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def versions_text() -> str:
    return ", ".join(f"{name} {release}" for name, release in installed().items())


def installed() -> dict[str, str]:
    versions = {}
    for name in ("torch", "triton", "transformers", "vllm"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
