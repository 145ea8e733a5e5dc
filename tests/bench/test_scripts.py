"""benchmarks/: every documented command parses, and the scripts compute correct results."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch

import bench
from benchmarks.engine import first_minute, startup
from benchmarks.engine.first_minute import Run
from benchmarks.engine.startup import PHASES
from nanovllm.cli import build_parser
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import dashed
from tests.bench.test_steps import CONFIG
from tests.cli.terminal_process import ROOT, run_program

DOCUMENTS = [path for name in (".", "docs", "benchmarks", "benchmarks/notes")
             for path in (ROOT / name).glob("*.md")]  # fmt: skip
COMMAND = re.compile(r"(?:python (-m benchmarks\.|bench\.py)|nanovllm (bench) )([^`#]*)")


def documented() -> list[str]:
    """Return all commands in backquotes or code blocks, as they would be typed."""
    report = (ROOT / "benchmarks" / "report.sh").read_text().replace("\\\n", "")
    commands = re.findall(r"^part \S+ (.*)", report, re.MULTILINE)
    commands = [f"python {command}" for command in commands]
    for path in DOCUMENTS:
        text = path.read_text().replace("\\\n", "")
        pieces = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        pieces = [line for piece in pieces for line in piece.splitlines()]
        pieces += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        commands += [" ".join(piece.partition("#")[0].split()) for piece in pieces]
    return sorted({command for command in commands if COMMAND.match(command)})


@pytest.mark.parametrize("command", documented())
def test_documented_commands_have_their_options(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command.replace("python -m nanovllm", "nanovllm"))
    if words[0] == "nanovllm":
        build_parser().parse_args(dashed(words[1:]))
        return
    monkeypatch.setattr(sys, "argv", words[1:] if words[1] == "bench.py" else words[2:])
    module = bench if words[1] == "bench.py" else importlib.import_module(words[2])
    if len(sys.argv) > 1:
        module.parse_args()
    else:
        assert callable(module.main)


def test_documented_scripts_are_there() -> None:
    sources = [*DOCUMENTS, *ROOT.glob("nanovllm/**/*.py"), ROOT / "Makefile"]
    paths = {
        each for path in sources for each in re.findall(r"benchmarks/[\w/]+\.\w+", path.read_text())
    }
    assert paths
    missing = [
        path for path in paths if not (ROOT / path).exists() and "benchmarks/out" not in path
    ]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engine.trace", "kernels.linear"])
def test_some_need_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", [name])
    assert exit_code(importlib.import_module(f"benchmarks.{name}").main) == 2
    assert "has no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_start_is_measured_in_its_own_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--device", "cpu", "--max-model-len=512", "--load-format", "dummy"]
    began = time.time()
    options += ["--measure", str(tmp_path), "--began", repr(began)]
    result = run_program("-m", "benchmarks.engine.startup", *options)
    assert (result.returncode, result.stderr) == (0, "")
    start = startup.Start(**json.loads(result.stdout))
    assert set(start.spans) < {*PHASES}
    assert all(seconds > 0 for seconds in start.spans.values())
    assert sum(start.spans.values()) < time.time() - began


def test_starts_are_listed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start_process(folder: Path, is_cold: bool) -> startup.Start:
        assert list(folder.glob("model/*.safetensors"))
        return startup.Start("cpu", "float32", {"imports": 2.0, "weights": 3.0 + 4 * is_cold})

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--model", str(tmp_path), "--json", str(tmp_path / "starts.jsonl")]
    monkeypatch.setattr(sys, "argv", ["startup.py", *options])
    monkeypatch.setattr(startup, "start_process", start_process)
    assert startup.main() == 0
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [(start["case"], start["value"]) for start in starts] == [
        ("start-cold", 9.0),
        ("start-warm", 5.0),
    ]
    header = next(line for line in capsys.readouterr().out.splitlines() if "| seconds" in line)
    assert all(phase in header for phase in PHASES)


# Writes each piece once the previous one has been read, so that the reader sees them all.
PIECES = """\
import array, fcntl, sys, termios
unread = array.array("i", [0])
for _ in range(20):
    sys.stdout.write("word ")
    sys.stdout.flush()
    while fcntl.ioctl(1, termios.FIONREAD, unread) or unread[0]:
        pass
"""


def test_pieces_of_text_are_timed() -> None:
    run = first_minute.measure([sys.executable, "-c", PIECES])
    assert 0 < run.median_gap <= run.longest_gap
    assert 0 < run.first < run.first + run.longest_gap <= run.total


def test_the_first_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(first=5.9, median_gap=0.1, longest_gap=0.3, total=9.0)
    commands = []
    monkeypatch.setattr(first_minute, "measure", lambda command: commands.append(command) or run)
    options = ["--runs", "1", "--json", str(tmp_path / "minute.jsonl"), "--", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", ["first_minute.py", *options])
    assert first_minute.main() == 0
    build_parser().parse_args(commands[0][3:])
    (record,) = map(json.loads, (tmp_path / "minute.jsonl").read_text().splitlines())
    assert (record["case"], record["longest_gap"]) == ("first-minute", 0.3)
    assert run.meets_bars
    assert not Run(first=5.9, median_gap=0.1, longest_gap=0.4, total=9.0).meets_bars
