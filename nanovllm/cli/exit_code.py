"""How a program ends: one clear line on stderr and an exit code instead of a traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from nanovllm.errors import ConfigError, NanovllmError

# What a disk or a pipe behind stdout can answer to a write.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)


def exit_code(run: Callable[[], int], program: str | None = None) -> int:
    """Run a program; 2 for options that cannot work, 1 for other failures, 130 after Ctrl-C.

    Errors begin with `program`, the command as typed; left out, it is the script's name.
    """
    program = program or Path(sys.argv[0]).name
    with contextlib.ExitStack() as stack:
        if sys.stderr is None:  # closed; print would take stdout in its place
            stack.enter_context(
                contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w")))
            )
        if sys.stdout is None:
            return _fail(program, "stdout is closed, and answers go there", 1)
        _write_what_can_be_encoded()
        return _run(run, program)


def complain(program: str, message: str) -> None:
    """Print an error as one line."""
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)


def _run(run: Callable[[], int], program: str) -> int:
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except NanovllmError as error:
        return _fail(program, str(error), 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in _WRITE_ERRORS or error.filename is not None:
            raise
        # Python flushes stdout once more at exit, so give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader has gone, and knows why
            return 1
        return _fail(program, f"cannot write to stdout: {error.strerror}", 1)


def _fail(program: str, message: str, code: int) -> int:
    complain(program, message)
    return code


def _write_what_can_be_encoded() -> None:
    """Show what a terminal cannot as "?"; a file that is not Unicode gets it as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream.isatty() else "backslashreplace")
