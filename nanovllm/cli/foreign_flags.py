"""Flags that people copy from recipes for vLLM and that have no place here, or none yet."""

from __future__ import annotations

import argparse
import sys

from nanovllm.engine_options import FOREIGN, NOT_NEEDED, foreign_notes

SHORT = {"pipeline_parallel_size": "-pp"}


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    for name in FOREIGN:
        flag, shorter = _flag(name), SHORT.get(name)
        names = [flag] if shorter is None else [flag, shorter]
        action = argparse.BooleanOptionalAction if name in NOT_NEEDED else "store"
        parser.add_argument(*names, dest=flag, action=action, help=argparse.SUPPRESS)


def check_foreign_flags(args: argparse.Namespace) -> None:
    """Print a line for each flag that changes nothing; refuse what is not built."""
    for note in foreign_notes({name: getattr(args, _flag(name)) for name in FOREIGN}, _flag):
        print(note, file=sys.stderr)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
