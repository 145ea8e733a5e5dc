"""A wheel installs every module and every data file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    """Builds from a copy, because it leaves files behind; torch depends on setuptools."""
    source, out = tmp_path / "source", tmp_path / "out"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "nanovllm", source / "nanovllm", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", f"--wheel-dir={out}"]
    command = [sys.executable, "-m", "pip", "wheel", ".", *options]
    subprocess.run(command, cwd=source, check=True, timeout=1200)
    [wheel] = out.glob("nanovllm-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    kept = {path.relative_to(ROOT).as_posix() for path in _package_files()}
    assert {name for name in names if name.startswith("nanovllm/")} == kept
    folders = {name.rpartition("/")[0] for name in kept}
    needed = ("devices/cpu", "devices/cuda", "devices/cuda/kernels", "serve/page")
    assert folders >= {f"nanovllm/{name}" for name in needed}
    assert "nanovllm/py.typed" in kept


@pytest.mark.parametrize("name", ["numba", "torch", "triton"])
def test_private_interfaces_are_of_releases_that_are_tested(name: str) -> None:
    """Only the pinned, tested releases may be installed."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    found = [line.strip(' ",') for line in lines if line.strip().startswith(f'"{name}>=')]
    (required,) = (Requirement(each).specifier for each in found)
    pinned = re.findall(rf"^{name}==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert any(each.operator == "<" for each in required)
    assert pinned
    assert all(each in required for each in pinned)


def _package_files() -> list[Path]:
    files = (ROOT / "nanovllm").rglob("*")
    return [path for path in files if path.is_file() and "__pycache__" not in path.parts]
