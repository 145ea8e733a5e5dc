"""Run a Python program in a real terminal: type, press Ctrl-C, read the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A session leader that opens a terminal makes it the controlling one, so Ctrl-C sends SIGINT.
_LAUNCH = """
import os, sys
os.open(os.ttyname(0), os.O_RDWR)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
_COMPILING = re.compile(r"(WARNING: )?Compiling the CPU kernels.*\n")
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def quiet_environment() -> dict[str, str]:
    """Return an environment with one thread and no network, for reproducible runs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
    return environment | {"PROMPT_TOOLKIT_NO_CPR": "1"}  # the pty sends no cursor positions


def heed_ctrl_c() -> None:
    """Restore SIGINT, which shells ignore for background jobs and all their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_program(
    *arguments: str, stdin: str = "", timeout: float = 480.0
) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end, without a terminal.

    The message about compiling kernels, printed by the first run after a change, is removed from
    stderr.
    """
    result = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=quiet_environment(),
        timeout=timeout,
        check=False,
    )
    result.stderr = _COMPILING.sub("", result.stderr)
    return result


class TerminalProcess:
    def __init__(self, *arguments: str, columns: int = 60) -> None:
        self.output = ""  # everything shown so far
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=quiet_environment(),
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )
        os.close(slave)

    @property
    def text(self) -> str:
        """The text shown so far, without escape sequences."""
        return _ESCAPE.sub("", self.output).replace("\r\n", "\n")

    @property
    def num_prompts(self) -> int:
        """The number of times prompt_toolkit has begun to read a line."""
        return self.output.count("\x1b[?2004h")

    def cpu_seconds(self) -> float:
        """Return the CPU time that the running program has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, is_there: Callable[[str], bool], timeout: float = 240.0) -> None:
        """Read until the text shown satisfies `is_there`."""
        deadline = time.monotonic() + timeout
        while not is_there(self.text):
            assert time.monotonic() < deadline, f"not shown in {timeout} s: {self.text!r}"
            assert self._read(), f"the program ended: {self.text!r}"

    def wait(self) -> int:
        """Read to the end and return the exit code."""
        while self._read():
            pass
        return self._process.wait(timeout=240)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 60.0)
        assert ready, f"silent for a minute: {self.text!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # on Linux: the other end is closed
            return False
        self.output += data.decode(errors="replace")
        return bool(data)
