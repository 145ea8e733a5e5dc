"""End a program with an exit code and one line on stderr instead of a traceback."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from nanovllm.errors import ConfigError, NanovllmError


def exit_code(run: Callable[[], int], program: str | None = None) -> int:
    """Run a program; return 2 for invalid options, 1 for other failures, 130 after Ctrl-C.

    Errors begin with `program`, the command as typed; by default it is the script's name.
    """
    program = program or Path(sys.argv[0]).name
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # replace characters that the stream cannot encode
            stream.reconfigure(errors="replace" if stream.isatty() else "backslashreplace")
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except NanovllmError as error:
        print_error(program, str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE) or error.filename is not None:
            raise
        # Python flushes stdout again at exit; redirect it to /dev/null, so that the flush succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # no message if the reader closed the pipe
            print_error(program, f"cannot write to stdout: {error.strerror}")
        return 1


def print_error(program: str, message: str) -> None:
    """Print an error as one line."""
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
