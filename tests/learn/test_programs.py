"""Every program in learn/ runs by itself, with the model in a folder; its page can be read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "learn").glob("day*_*.py"))  # not a reader's answers, day1.py
SOLUTIONS = sorted((ROOT / "learn" / "solutions").glob("day*.py"))
PAGES = sorted((ROOT / "docs" / "learn").glob("*.md"))
# A reference to the engine: `nanovllm/engine/scheduler.py::Scheduler.schedule`.
REFERENCE = re.compile(r"(nanovllm/[\w/]+\.py)::([\w.]+)")


RUN_ALL = """
import runpy, sys, common
folder, *programs = sys.argv[1:]
tokenizer = common.load_tokenizer(common.find_checkpoint(folder))
common.load_tokenizer = lambda checkpoint: tokenizer
for program in programs:
    print(f"== {program}")
    sys.argv = [program, "--model", folder]
    runpy.run_path(program, run_name="__main__")
"""


def test_programs_run_by_themselves(tiny_folder: Path, tmp_path: Path) -> None:
    """One process runs them all: the imports and the tokenizer take longer than the programs."""
    # Python puts the folder of a program first on the path.
    script = f"import sys; sys.path[0] = {str(ROOT / 'learn')!r}" + RUN_ALL
    programs = [*PROGRAMS, *SOLUTIONS[:-1]]  # the last one spawns processes, which need a main file
    command = [sys.executable, "-c", script, str(tiny_folder), *map(str, programs)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    outputs = result.stdout.split("== ")[1:]
    assert len(outputs) == len(programs)
    assert all(len(output.splitlines()) > 10 for output in outputs[: len(PROGRAMS)])


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
