"""How a program ends: one clear line on stderr and an exit code instead of a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from nanovllm.errors import ConfigError, NanovllmError


def exit_code(run: Callable[[], int]) -> int:
    """Run a program; 2 for options that cannot work, 1 for other failures, 130 after Ctrl-C."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except NanovllmError as error:
        message = " ".join(str(error).split())
        print(f"nanovllm: error: {message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone. Python flushes stdout once more at exit, so give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
