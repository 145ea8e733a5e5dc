"""Flags that people copy from recipes for vLLM and that have no place here, or none yet."""

from __future__ import annotations

import argparse
import sys

from nanovllm.errors import ConfigError

# What is so in any case, or concerns what this engine does not have: said once and left aside.
NOT_NEEDED = {
    "--trust-remote-code": "code from a repository is never run",
    "--enable-auto-tool-choice": "tool calls are read wherever a request has tools",
    "--enable-chunked-prefill": "long prompts are always read in chunks",
    "--async-scheduling": "steps are planned ahead where that helps",
    "--disable-log-requests": "prompts are never logged",
    "--no-enable-log-requests": "prompts are never logged",
    "--disable-log-stats": "--log-level warning leaves them out",
    "--disable-uvicorn-access-log": "requests are logged with --verbose",
    "--disable-frontend-multiprocessing": "the engine has a process of its own",
    "--enable-server-load-tracking": "/load is always there",
    "--enable-prompt-tokens-details": "usage always has the cached tokens",
    "--enable-force-include-usage": "streams have usage where a request asks for it",
    "--disable-custom-all-reduce": "there is no such kernel",
    "--enable-expert-parallel": "experts are split with the other weights",
}
NOT_NEEDED_WITH_VALUE = {
    "--swap-space": "there is no swap space",
    "--uvicorn-log-level": "use --log-level",
    "--max-log-len": "prompts are never logged",
    "--tokenizer-mode": "the model's own tokenizer is used",
    "--compilation-config": "graphs are on unless --enforce-eager",
    "--max-seq-len-to-capture": "graphs do not depend on lengths",
    "--guided-decoding-backend": "structured output has one backend",
    "--structured-outputs-config": "structured output has one backend",
    "--scheduling-policy": "requests are served by priority, then in order",
    "--limit-mm-per-prompt": "models read text only",
    "--response-role": "answers are the assistant's",
}
# What would change the answers or the speed, with the values that ask for nothing.
NOT_BUILT = {
    "--speculative-config": ("none",),
    "--pipeline-parallel-size": ("1",),
    "--cpu-offload-gb": ("0",),
    "--lora-modules": (),
    "--hf-overrides": (),
    "--rope-scaling": (),
    "--tokenizer": (),
}
SHORT = {"--pipeline-parallel-size": "-pp"}


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    hidden = argparse.SUPPRESS
    for flag in NOT_NEEDED:
        parser.add_argument(flag, dest=flag, action="store_true", help=hidden)
    for flag in (*NOT_NEEDED_WITH_VALUE, *NOT_BUILT):
        names = [flag, SHORT[flag]] if flag in SHORT else [flag]
        parser.add_argument(*names, dest=flag, help=hidden)


def check_foreign_flags(args: argparse.Namespace) -> None:
    """Print a line for each flag that changes nothing; refuse what is not built."""
    for flag, reason in (NOT_NEEDED | NOT_NEEDED_WITH_VALUE).items():
        if getattr(args, flag):
            print(f"{flag} changes nothing: {reason}", file=sys.stderr)
    for flag, harmless in NOT_BUILT.items():
        value = getattr(args, flag)
        if value is None:
            continue
        if value.lower() not in harmless:
            raise ConfigError(f"{flag} {value} is not supported")
        print(f"{flag} {value} changes nothing", file=sys.stderr)
