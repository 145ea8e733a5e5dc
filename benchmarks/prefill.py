"""Prompt tokens per second over 64 prompts of 2,048 tokens, beside the physical floor.

    python -m benchmarks.prefill --model qwen3-0.6b --json benchmarks/out/results.jsonl

The same as `nanovllm bench prefill`; --help explains it.
"""

from __future__ import annotations

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "prefill", *sys.argv[1:]]))
