"""Milliseconds per decode step at batch 1, 8, 64 and 256, beside the physical floor.

    python -m benchmarks.latency --model qwen3-0.6b --json benchmarks/out/results.jsonl

The same as `nanovllm bench latency`; --help explains it.
"""

from __future__ import annotations

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "latency", *sys.argv[1:]]))
