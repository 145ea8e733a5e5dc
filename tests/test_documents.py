"""README.md and docs/: the files and options that they mention exist."""

from __future__ import annotations

import re
import runpy
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.cli import build_parser, main, parse
from tests import test_rings as rings

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "docs/learn", "benchmarks", "benchmarks/notes")
DOCUMENTS = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
# Users' files, which are not in the repository.
THEIRS = {"config.json", "generation_config.json", "config.yaml", "server.yaml", "trace.json"}
THEIRS |= {"result.json", "openapi.json", "opencode.json", "OUTPUT.job.json"}
THEIRS |= {"modules.json", "config_sentence_transformers.json"}
OTHER_PROGRAMS = {"--no-deps", "--backend"}  # options of pip and guidellm


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(path: Path) -> str:
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for link in re.findall(r"\]\(([^)]+)\)", prose(path)):
            if link.startswith("https://"):
                continue
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), f"{path.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{path.name}: {link}"


def test_files_that_are_named_are_there() -> None:
    folders = ("nanovllm", "tests", "docs", "learn", "benchmarks", "deploy", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    there = [f"/{path.relative_to(ROOT).as_posix()}" for path in [*files, *ROOT.iterdir()]]
    for path in DOCUMENTS:
        text = re.sub(r"https?://\S+", "", path.read_text(encoding="utf-8"))
        names = set(re.findall(r"(?<![\w/.*])[\w./-]*\w\.(?:py|md|sh|yaml|json|service)\b", text))
        names = {name.lstrip("./") for name in names if name.rpartition("/")[2] not in THEIRS}
        missing = [name for name in names if not any(each.endswith(f"/{name}") for each in there)]
        assert missing == [], path.name


def commands() -> Iterator[str]:
    """Yield the commands in code blocks, except benchmarks, which have their own test."""
    for path in DOCUMENTS:
        for _, block in BLOCK.findall(path.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", "").splitlines():
                if line.startswith("nanovllm ") and not line.startswith("nanovllm bench"):
                    yield re.split(r" +#| [<>|] ", line)[0]


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands_can_be_given(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [options] = re.findall(
        r"```yaml\n# server.yaml\n(.*?)```", read("docs/operations.md"), re.DOTALL
    )
    (tmp_path / "server.yaml").write_text(options)
    monkeypatch.chdir(tmp_path)
    assert callable(parse(shlex.split(command)[1:]).run)


def options_of(parser: ArgumentParser) -> set[str]:
    options = {name for action in parser._actions for name in action.option_strings}
    choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    parsers = [each for group in choices for each in group.values()]
    return options.union(*map(options_of, parsers))


def test_flags_that_are_named_are_there() -> None:
    known = options_of(build_parser()) | OTHER_PROGRAMS
    for path in DOCUMENTS:
        if path.is_relative_to(ROOT / "benchmarks"):  # has its own test
            continue
        commands = re.findall(r"`((?:--|nanovllm )[^`]*)`", prose(path))
        flags = [flag for command in commands for flag in re.findall(r"--[\w-]+", command)]
        assert [flag for flag in flags if flag not in known] == [], path.name


def test_the_rings_are_the_ones_that_are_checked() -> None:
    page = " ".join(read("docs/architecture.md").split())
    assert " < ".join(["records", *rings.RINGS[1:]]) in page


def test_the_architecture_fits_on_a_page() -> None:
    assert len(read("docs/architecture.md").split()) <= 1400


def test_the_capabilities_are_folders_and_options_that_exist() -> None:
    """architecture.md lists each folder that can be deleted, with the option that needs it."""
    page, package = read("docs/architecture.md"), ROOT / "nanovllm"
    rows = re.findall(r"^\| \[.*\| `([\w/]+)` \| (?:`(\w+)` )?\|", page, re.MULTILINE)
    features = [path.parent for path in package.glob("features/*/__init__.py")]
    there = [*features, package / "models" / "fallback", package / "serve" / "live"]
    there.append(package / "vision")
    names = [path.relative_to(package).as_posix() for path in there if path.is_dir()]
    assert sorted(folder for folder, _ in rows) == sorted(names)
    known = re.findall(r"^\| `(\w+)`", read("docs/reference.md"), re.MULTILINE)
    assert {option for _, option in rows if option} < set(known)


def test_the_reference_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    assert read("docs/reference.md") == script["reference"](), "run `make reference`"
    assert script["fields_table"]() in read("docs/serving.md"), "run `make reference`"


@pytest.mark.slow
def test_the_first_command_has_the_same_output_in_float32(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is the same on every CPU, because the top two tokens are never nearly tied."""
    monkeypatch.setattr("sys.stdin", None)
    [(command, answer)] = re.findall(
        r"^nanovllm (generate .*)\n(?:.*\n)*?```\n```\n(.*)\n\nprompts",
        read("docs/install.md"),
        re.M,
    )
    assert main([*shlex.split(command), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.strip() == answer
