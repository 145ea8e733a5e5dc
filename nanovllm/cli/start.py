"""What every command does first: set up logging, load the model."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from nanovllm.config import EngineConfig

if TYPE_CHECKING:
    from nanovllm.llm import LLM


def configure_logging(is_verbose: bool) -> None:
    """Show warnings on stderr, and with `is_verbose` what the engine reports about itself."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO if is_verbose else logging.WARNING)
    logging.basicConfig(format="%(levelname)s: %(message)s", handlers=[handler])
    # At INFO the engine draws a bar while it loads: good at a terminal, noise in a log file.
    is_shown = is_verbose or sys.stderr.isatty()
    logging.getLogger("nanovllm").setLevel(logging.INFO if is_shown else logging.WARNING)


def load_llm(config: EngineConfig) -> LLM:
    """Start an engine; torch is imported here and not before."""
    if sys.stderr.isatty():
        print(f"Loading {config.model} ...", file=sys.stderr)
    from nanovllm.llm import LLM

    return LLM(**asdict(config))
