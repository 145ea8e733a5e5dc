"""Python programs in separate processes; every wait for them has a timeout."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tests.cli.terminal_process import ROOT, heed_ctrl_c, quiet_environment
from tests.parallel.leftovers import wait_until

SECONDS = 240.0  # to import torch and load a model on a slow and busy machine


@dataclass(frozen=True)
class Program:
    process: subprocess.Popen[bytes]
    output: TextIO
    error_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def errors(self) -> str:
        return self.error_file.read_text()

    def read_line(self) -> str:
        """Return the next line of output; fail if the program exits or the wait times out."""
        line = ""

        def is_over() -> bool:
            nonlocal line
            has_ended = self.process.poll() is not None  # polled first: it may print, then exit
            line += self.output.readline()
            return has_ended or line.endswith("\n")

        wait_until(is_over, SECONDS, lambda: f"said only {line!r}; {self.errors()}")
        assert line.endswith("\n"), self.errors()
        return line

    def read_pids(self) -> list[int]:
        return [int(word) for word in self.read_line().split()]

    def wait(self, seconds: float = SECONDS) -> int:
        """Return the exit code, negative for a signal."""
        wait_until(lambda: self.process.poll() is not None, seconds, self.errors)
        assert self.process.returncode is not None
        return self.process.returncode


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    """Start a program in its own process group, as a shell would."""
    with tempfile.TemporaryDirectory() as folder:
        # Use files: a pipe stays open as long as a leaked worker holds it.
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with output.open("ab") as stdout, errors.open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
                env={**quiet_environment(), "PYTHONPATH": str(ROOT)},
                start_new_session=True,
                preexec_fn=heed_ctrl_c,
            )
        try:
            with output.open() as said:
                yield Program(process, said, errors)
        finally:
            process.kill()
            process.wait(SECONDS)
