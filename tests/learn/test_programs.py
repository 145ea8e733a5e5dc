"""Every program in learn/ runs by itself, with the model in a folder; its page can be read."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import common
import day1_forward

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "learn").glob("day*_*.py"))  # not a reader's answers, day1.py
SOLUTIONS = sorted((ROOT / "learn" / "solutions").glob("day*.py"))
PAGES = sorted((ROOT / "docs" / "learn").glob("*.md"))
# A reference to the engine: `nanovllm/engine/scheduler.py::Scheduler.schedule`.
REFERENCE = re.compile(r"(nanovllm/[\w/]+\.py)::([\w.]+)")


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return common.load_tokenizer(common.find_checkpoint(str(tiny_folder)))


# The last solution spawns processes, which need a main file.
@pytest.mark.parametrize("path", [*PROGRAMS, *SOLUTIONS[:-1]], ids=lambda path: path.stem)
def test_a_program_runs_by_itself(
    path: Path,
    tiny_folder: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(common, "load_tokenizer", lambda checkpoint: tokenizer)
    monkeypatch.setattr(day1_forward, "project_qkv", day1_forward.project_qkv)  # a solution sets it
    monkeypatch.setattr(sys, "argv", [str(path), "--model", str(tiny_folder)])
    runpy.run_path(str(path), run_name="__main__")
    assert path in SOLUTIONS or len(capsys.readouterr().out.splitlines()) > 10


@pytest.mark.parametrize("path", [*PROGRAMS, *SOLUTIONS], ids=lambda path: path.stem)
def test_only_common_uses_the_package(path: Path) -> None:
    """The programs build the engine from nothing."""
    assert not re.search(r"^\s*(from|import) nanovllm", path.read_text(), re.MULTILINE)


def test_every_program_has_a_page_and_solutions() -> None:
    days = [path.stem.split("_")[0] for path in PROGRAMS]
    assert days == [path.stem for path in SOLUTIONS]
    assert days == [path.stem for path in PAGES if path.stem != "README"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_is_short_and_names_functions_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 800
    references = REFERENCE.findall(text)
    assert page.stem == "README" or references
    for file, name in references:
        assert name in definitions(ROOT / file), f"{page.name}: {file}::{name}"


def definitions(file: Path) -> set[str]:
    """Return the names of the functions, classes and methods that a file defines."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names
