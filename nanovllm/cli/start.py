"""The first steps of every command: set up logging, load the model."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from nanovllm.llm import LLM

INTERRUPTED = 130  # the exit code


def configure_logging(is_verbose: bool, level: str | None = None, is_server: bool = False) -> None:
    """Show warnings on stderr; at a terminal or if `is_verbose`, also what the engine is doing.

    A `level` overrides both. The lines of a server have a time and a level.
    """
    handler = logging.StreamHandler()
    server_lines = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(server_lines if is_server else _Lines())
    logging.basicConfig(handlers=[handler])
    default = "INFO" if is_verbose or sys.stderr.isatty() else "WARNING"
    logging.getLogger("nanovllm").setLevel((level or default).upper())


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname}: {text}"


@contextlib.contextmanager
def load_llm(config: EngineConfig, num_threads: int | None = None) -> Iterator[LLM]:
    """Start an engine, and close it; torch is imported here and not before.

    After Ctrl-C the program ends at once: closing would wait for the step that runs.
    """
    _check_threads(num_threads, config)
    if sys.stderr.isatty():
        print(f"Loading {config.model} ...", file=sys.stderr)
    from nanovllm.llm import LLM

    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
    llm = LLM(**asdict(config))
    try:
        yield llm
    except KeyboardInterrupt:
        print(file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(INTERRUPTED)
    finally:
        llm.close()


def set_child_threads(num_threads: int | None, config: EngineConfig) -> None:
    """Set the CPU threads of engines that are started as child processes."""
    _check_threads(num_threads, config)
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def _check_threads(num_threads: int | None, config: EngineConfig) -> None:
    if num_threads is not None and config.tensor_parallel_size > 1:
        raise ConfigError("--threads is for one process; several share the cores among them")
