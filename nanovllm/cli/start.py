"""Start a command: configure logging and load the model."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from nanovllm.cli.options import check_no_engine_options, engine_config
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.serve.client import HttpLLM, OpenAIClient

if TYPE_CHECKING:
    from nanovllm.llm import LLM

INTERRUPTED = 130  # exit code after Ctrl-C


def configure_logging(is_verbose: bool, level: str | None = None, is_server: bool = False) -> None:
    """Log warnings to stderr; at a terminal or if `is_verbose`, log engine activity too.

    A `level` overrides both. A server's log lines have a timestamp.
    """
    handler = logging.StreamHandler()
    line = "%(asctime)s %(levelname)s %(message)s" if is_server else "%(levelname)s: %(message)s"
    handler.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(handlers=[handler])
    default = "INFO" if is_verbose or sys.stderr.isatty() else "WARNING"
    logging.getLogger("nanovllm").setLevel((level or default).upper())


@contextlib.contextmanager
def open_model(args: argparse.Namespace) -> Iterator[LLM | HttpLLM]:
    """Yield the model that a command uses: one on a server, or one loaded in this process."""
    if args.url is None:
        if args.api_key is not None:
            raise ConfigError("--api-key is for a server; add --url or leave it out")
        with load_llm(engine_config(args), args.threads) as llm:
            yield llm
        return
    check_no_engine_options(args)
    client = OpenAIClient(args.url, args.api_key)
    yield HttpLLM(client, args.model_tag or args.model or asyncio.run(client.model()))


def has_chat_template(llm: LLM | HttpLLM) -> bool:
    """Whether the model has a chat template; a server is assumed to have one."""
    if isinstance(llm, HttpLLM):
        return True
    tokenizer = llm.engine.input_processor.tokenizer
    return tokenizer is not None and bool(tokenizer.chat_template)


@contextlib.contextmanager
def load_llm(config: EngineConfig, num_threads: int | None = None) -> Iterator[LLM]:
    """Start an engine, which imports torch, and close it at the end.

    After Ctrl-C the program exits immediately: closing would wait for the current step.
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
    """Set the number of CPU threads of engines that run in child processes."""
    _check_threads(num_threads, config)
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def _check_threads(num_threads: int | None, config: EngineConfig) -> None:
    if num_threads is not None and config.tensor_parallel_size > 1:
        raise ConfigError("--threads is for one process; tensor-parallel ranks share the cores")
