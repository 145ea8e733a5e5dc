"""Time to the first token with and without a cached prefix, beside the physical floor.

    python -m benchmarks.prefix --model qwen3-0.6b --json benchmarks/out/results.jsonl

The same as `nanovllm bench prefix`; --help explains it.
"""

from __future__ import annotations

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "prefix", *sys.argv[1:]]))
