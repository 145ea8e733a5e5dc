"""A wheel contains every module and data file, and generates text once it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nanovllm import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, because a build leaves files behind; setuptools comes with torch."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "nanovllm", source / "nanovllm", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", f"--wheel-dir={out}"]
    command = [sys.executable, "-m", "pip", "wheel", ".", *options]
    subprocess.run(command, cwd=source, check=True, timeout=1200)
    [wheel] = out.glob("nanovllm-*.whl")
    return wheel


@pytest.mark.slow
def test_a_wheel_holds_the_whole_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kept = {path.relative_to(ROOT).as_posix() for path in _package_files()}
    assert {name for name in names if name.startswith("nanovllm/")} == kept
    folders = {name.rpartition("/")[0] for name in kept}
    needed = ("devices/cpu", "devices/cuda", "devices/cuda/kernels", "serve/live/page")
    assert folders >= {f"nanovllm/{name}" for name in needed}
    assert "nanovllm/py.typed" in kept


@pytest.mark.slow
def test_an_installed_wheel_answers(wheel: Path, tmp_path: Path) -> None:
    """Installs into a new environment that sees the packages of this one, but not its nanovllm."""
    venv.create(tmp_path / "new", symlinks=True)
    programs = tmp_path / "new" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--quiet", str(wheel)], check=True)
    [packages] = (tmp_path / "new").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    _copy_kernels(packages / "nanovllm" / "devices" / "cpu" / "kernels")

    def run(*arguments: str) -> str:
        command = [str(programs / "nanovllm"), *arguments]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        options = {"cwd": tmp_path, "env": environ, "stdin": subprocess.DEVNULL, "text": True}
        return subprocess.check_output(command, **options).strip()

    assert run("--version") == f"nanovllm {__version__}"
    assert run("generate", "What is the capital of Germany?") == "The capital of Germany is Berlin."


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-gpu.txt"])
@pytest.mark.parametrize("name", ["numba", "torch", "triton"])
def test_private_interfaces_are_of_releases_that_are_tested(name: str, file: str) -> None:
    """Requirements have an upper bound, and allow the pinned releases, which are tested."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    found = [line.strip(' ",') for line in lines if line.strip().startswith(f'"{name}>=')]
    (required,) = (Requirement(each).specifier for each in found)
    pinned = re.findall(rf"^{name}==([\d.]+)", (ROOT / file).read_text(), re.M)
    assert any(each.operator == "<" for each in required)
    assert pinned
    assert all(each in required for each in pinned)


def _package_files() -> list[Path]:
    files = (ROOT / "nanovllm").rglob("*")
    return [path for path in files if path.is_file() and "__pycache__" not in path.parts]


def _copy_kernels(folder: Path) -> None:
    """Copy the compiled CPU kernels; numba loads them if times and sizes of sources match."""
    compiled = ROOT / "nanovllm" / "devices" / "cpu" / "kernels"
    for source in compiled.glob("*.py"):
        shutil.copystat(source, folder / source.name)
    (folder / "__pycache__").mkdir(exist_ok=True)
    for file in compiled.glob("__pycache__/*.nb[ci]"):
        shutil.copy(file, folder / "__pycache__")
