"""Exit codes of programs, and their one-line error messages."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from nanovllm.cli import main
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import CheckpointError, ConfigError, RequestError
from tests.cli.terminal_process import ROOT

PRINT = """
import sys
from nanovllm.cli.exit_code import exit_code
sys.exit(exit_code(lambda: print("an \\xe9 answer", flush="flush" in sys.argv) or 0, "prog"))
"""


def run_shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which $RUN is a program that prints one line."""
    variables = {"RUN": PRINT, "PYTHON": sys.executable, **environment}
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
        check=False,
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a\n b"), 2), (RequestError("a\n b"), 1), (CheckpointError("a\n b"), 1)],
)
def test_exit_codes(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: raise_(error), "nanovllm fly") == code
    assert capsys.readouterr().err == "nanovllm fly: error: a b\n"


def test_a_script_is_named_as_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["../some/bench.py", "--x"])
    exit_code(lambda: raise_(ConfigError("no")))
    assert capsys.readouterr().err == "bench.py: error: no\n"


def test_ctrl_c_ends_a_program_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: raise_(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "\n"


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(FileNotFoundError):
        exit_code(lambda: os.stat("/no/such/file").st_size)
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)


def test_a_closed_pipe_prints_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", PRINT]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert (process.communicate()[1], process.returncode) == (b"", 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("argument", ["flush", "buffer"])
def test_a_full_disk_is_reported(argument: str) -> None:
    result = run_shell(f'"$PYTHON" -c "$RUN" {argument} > /dev/full')
    assert result.returncode == 1
    assert result.stderr == "prog: error: cannot write to stdout: No space left on device\n"


def test_unencodable_characters_are_escaped() -> None:
    result = run_shell('"$PYTHON" -c "$RUN"', PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout, result.stderr) == (0, "an \\xe9 answer\n", "")


def test_an_ascii_terminal_shows_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", Terminal(buffer, encoding="ascii"))
    assert exit_code(lambda: print("an é answer 🙂") or 0) == 0
    assert buffer.getvalue() == b"an ? answer ?\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("generate x --dtype int8", 2, "generate: error: dtype must be 'auto' or one of"),
        ("generate x --top-p 2", 2, "generate: error: top_p must be in (0, 1]"),
        ("generate --file /no/such/file", 2, "/no/such/file: No such file or directory"),
        ("generate --raw --system s x", 2, "generate: error: --system is part of a chat"),
        ("generate x --threads 2 --tensor-parallel-size 2", 2, "--threads is for one process"),
        ("chat --max-num-seqs 0", 2, "chat: error: max_num_seqs must be at least 1, got 0"),
        ("chat --model no-such-model", 1, "chat: error: no model 'no-such-model'"),
    ],
)
@pytest.mark.usefixtures("nothing")
def test_errors_are_one_line(
    arguments: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("nanovllm ")
    assert message in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ("generate --no-such-option", "nanovllm generate"),
        ("generate x --threads 0", "nanovllm generate"),
        ("fly", "nanovllm"),
        ("chat x y", "nanovllm chat"),
        ("bench", "nanovllm bench"),
        ("bench latency --batch 0", "nanovllm bench latency"),
        ("bench latency --no-such-option", "nanovllm bench latency"),
        ("models x", "nanovllm models"),
    ],
)
def test_wrong_usage_is_short(
    arguments: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    usage, error = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert usage.startswith(f"usage: {program} ")
    assert error.startswith(f"{program}: error: ")


def raise_(error: BaseException) -> int:
    raise error
