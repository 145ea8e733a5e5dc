"""README.md and docs/: the commands and programs in code blocks run, and print what is shown.

CONTRIBUTING.md says how a page marks code that cannot run everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

import nanovllm
from nanovllm import AsyncLLM
from nanovllm.batch import batch_engine
from nanovllm.cli import main, start
from nanovllm.cli.start import load_llm
from nanovllm.config import EngineConfig
from tests.cli.terminal_process import ROOT, quiet_environment

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A block of code, and the block of output that may follow it.
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n(?:```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"#.*\bneeds (.*\b(GPUs?|cluster|network|Docker)|systemd)\b")
EXCERPT = "# excerpt of "  # begins a block that shows code of the engine
# Tests that read the programs of a page and run them in other ways.
OTHER_TESTS = {
    "serving.md": "tests/clients/test_clients.py",
    "adding-a-feature.md": "tests/engine/test_adding_a_feature.py",
    "adding-a-model.md": "tests/models/test_adding_a_model.py",
}
# tests/test_wheel.py installs the package into a new environment; make installs all packages.
INSTALLS = ("pip install ", "python3 -m venv ")
# Users' files that the pages read.
FILES = {
    "report.txt": "Sales rose by ten percent. Costs stayed the same.",
    "questions.txt": "What is the capital of France?\nWhat is the capital of Italy?\n",
    "questions.jsonl": '{"prompt": "What is the capital of Italy?"}\n',
    ".curlrc": "fail\nsilent\nshow-error\n",  # an error status makes curl fail
}
VARYING = re.compile(r"\d+\.\d+|(?<=input )\d+|(?<=output )\d+|\.\.\.")  # times and omissions


class Block(NamedTuple):
    language: str
    text: str
    output: str  # empty if the page shows none

    @property
    def can_run(self) -> bool:
        comments = [line for line in self.text.splitlines() if line.startswith("#")]
        return not any(MARK.match(line) or line.startswith(EXCERPT) for line in comments)

    def commands(self) -> list[str]:
        lines = self.text.replace("\\\n", "").splitlines()
        lines = [line for line in lines if line and not line.startswith(("#", *INSTALLS))]
        return [line for line in lines if not MARK.search(line)]

    def check(self, printed: str) -> None:
        if self.output:
            parts = [re.escape(part) for part in VARYING.split(self.output.strip())]
            assert re.fullmatch(".*".join(parts), printed.strip()), printed


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text(encoding="utf-8"))]


def programs_of(page: Path) -> list[Block]:
    languages = {"bash"} if page.name in OTHER_TESTS else {"bash", "python"}
    return [block for block in blocks_of(page) if block.language in languages and block.can_run]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_are_in_blocks_with_a_language(page: Path) -> None:
    starts = ("nanovllm ", "python ", "pip ", "make ", "curl ", "ray ", "from ", "import ")
    for block in blocks_of(page):
        assert block.language in {"bash", "python", "yaml", "toml", "json", ""}
        lines = block.text.splitlines() if block.language == "" else []
        assert [line for line in lines if line.startswith(starts)] == []


def test_other_tests_read_their_pages() -> None:
    assert all(page in (ROOT / test).read_text() for page, test in OTHER_TESTS.items())


class Servers:
    """The servers that pages start; commands with the same options share one."""

    def __init__(self) -> None:
        self._ports: dict[str, str] = {}  # keyed by options
        self._processes = contextlib.ExitStack()

    def port(self, options: str = "") -> str:
        """Return the port of a server with these options; start it if it is not running."""
        options = options.replace("--port 8000", "").replace("0.0.0.0", "127.0.0.1").strip()
        if options not in self._ports:
            command = [sys.executable, "-m", "nanovllm", "serve", *shlex.split(options)]
            process = self._processes.enter_context(
                subprocess.Popen(
                    [*command, "--port", "0"], stderr=subprocess.PIPE, text=True, env=environment()
                )
            )
            self._processes.callback(process.terminate)
            assert process.stderr is not None
            log = iter(process.stderr.readline, "")
            found = (re.search(r" is at https?://[\d.]+:(\d+) ", line) for line in log)
            self._ports[options] = next(each[1] for each in found if each)
        return self._ports[options]

    def close(self) -> None:
        self._processes.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with contextlib.closing(Servers()) as servers:
        yield servers


@pytest.fixture(scope="module")
def shared_engines() -> Iterator[None]:
    """Let commands and programs with the same engine options share an engine.

    Asynchronous engines are not shared, but run in this process: a new one takes seconds to start.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def load(config: EngineConfig, num_threads: int | None) -> Any:
            return contextlib.nullcontext(stack.enter_context(load_llm(config, num_threads)))

        def create(model: str, **options: Any) -> Any:
            return load(EngineConfig(model, **options), None).enter_result

        in_process = functools.partial(AsyncLLM, in_process=True)
        with (
            patch.object(start, "load_llm", load),
            patch.object(nanovllm, "LLM", create),
            patch.object(nanovllm, "AsyncLLM", in_process),
            patch.object(batch_engine, "AsyncLLM", in_process),
        ):
            yield


@pytest.mark.slow
@pytest.mark.usefixtures("shared_engines", "one_thread")
@pytest.mark.parametrize("page", [*filter(programs_of, PAGES)], ids=lambda page: page.stem)
def test_a_page(
    page: Path, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for processes that commands start
    shown = {re.findall(r"[\w.]+", block.text)[0]: block.text for block in blocks_of(page)
             if block.language == "yaml"}  # fmt: skip
    for name, text in {**FILES, **shown}.items():
        Path(name).write_text(text)
    scope: dict[str, Any] = {}
    port = ""
    for block in programs_of(page):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block.text, str(page), "exec"), scope)
            assert bool(printed.getvalue().strip()) == ("print(" in block.text)
            block.check(printed.getvalue())
            continue
        output = ""
        for command in block.commands():
            if command.startswith("nanovllm serve"):
                port = servers.port(command.removeprefix("nanovllm serve").partition(" #")[0])
                continue
            if ":8000" in command:
                port = port or servers.port()
            output += run(command.replace(":8000", f":{port}"))
        block.check(output)


def run(command: str) -> str:
    words = shlex.split(command, comments=True)
    if words[0] == "nanovllm":
        return run_in_process(words[1:])
    if words[0] == "make":
        command = f"make --dry-run --directory {ROOT} {words[1]}"
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    result = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def run_in_process(words: list[str]) -> str:
    """Run a nanovllm command, with its redirections, in this process: a new one takes seconds."""
    files = {sign: words[words.index(sign) + 1] for sign in ("<", ">") if sign in words}
    arguments = [word for word in words if word not in {*files, *files.values()}]
    Path("stdin").write_text("Hello!\n" if words[0] == "chat" else "")
    before, new = os.dup(0), os.open(files.get("<", "stdin"), os.O_RDONLY)
    os.dup2(new, 0)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(new)
    assert code == 0, f"{words}\n{out.getvalue()}{err.getvalue()}"
    if ">" in files:
        Path(files[">"]).write_text(out.getvalue())
        return err.getvalue()
    return out.getvalue() + re.sub(r"\r.*\n", "", err.getvalue())  # without progress bars


def environment() -> dict[str, str]:
    return {**quiet_environment(), "PYTHONPATH": str(ROOT), "CURL_HOME": os.getcwd()}
