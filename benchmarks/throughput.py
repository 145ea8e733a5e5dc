"""New tokens per second over nano-vLLM's 256 requests, beside the physical floor.

    python -m benchmarks.throughput --model qwen3-0.6b --json benchmarks/out/results.jsonl

The same as `nanovllm bench throughput`; --help explains it.
"""

from __future__ import annotations

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "throughput", *sys.argv[1:]]))
