"""What rounding keys and values costs in quality: perplexity of a fixed text, on the CPU.

    python -m benchmarks.engine.kv_cache_quality

The text is prose of this project as it once was. Each of its tokens but the first is predicted
from all before it, whose keys and values come from the cache.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from nanovllm import LLM, SamplingParams

TEXT = Path(__file__).with_name("perplexity.txt")
MAX_LOSS = 0.005  # relative, of eight bits


def main() -> None:
    parser = argparse.ArgumentParser(description="perplexity by the type of the KV cache")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    found = {name: perplexity(args.model, args.dtype, name) for name in ("auto", "fp8")}
    for name, value in found.items():
        print(f"{args.model} {args.dtype} kv_cache_dtype={name}: perplexity {value:.4f}")
    print(f"{100 * (found['fp8'] / found['auto'] - 1):+.3f}%")


def perplexity(model: str, dtype: str, kv_cache_dtype: str) -> float:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    options = {"device": "cpu", "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    with LLM(model, **options) as llm:
        (output,) = llm.generate([TEXT.read_text()], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    logprobs = [known[token].logprob for token, known in pairs if known is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


if __name__ == "__main__":
    main()
