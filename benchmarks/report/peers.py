"""What other engines reach on the benchmarks' cases.

They were measured separately, on the same kind of machine: one H200, torch 2.11.0+cu130, random
bf16 weights in the same shapes, the same requests, best of two runs.
"""

from __future__ import annotations

PEERS: dict[str, dict[str, dict[str, float]]] = {
    "qwen3-0.6b": {
        "nano": {"nano-vllm + FA3": 19391, "vLLM 0.25.1": 19878, "mini-sglang": 21258},
        "bs1": {"nano-vllm + FA3": 2.38, "vLLM 0.25.1": 2.44, "mini-sglang": 1.75},
        "bs64": {"nano-vllm + FA3": 3.36, "vLLM 0.25.1": 3.89, "mini-sglang": 2.73},
        "bs256": {"vLLM 0.25.1": 7.98, "mini-sglang": 5.94},
        "prefill": {"vLLM 0.25.1": 326559, "mini-sglang": 416054},
    },
    "qwen3-8b": {
        "nano": {"nano-vllm + FA3": 8233, "vLLM 0.25.1": 8971},
        "bs1": {"nano-vllm + FA3": 6.08, "vLLM 0.25.1": 5.24},
        "bs64": {"nano-vllm + FA3": 7.86, "vLLM 0.25.1": 7.19},
    },
}
