"""What rounding keys and values costs in quality: perplexity of a fixed text, on the CPU.

    python -m benchmarks.engine.kv_cache_quality

The text is prose of this project as it once was. Each of its tokens but the first is predicted
from all before it, whose keys and values come from the cache. "fp8, not spread" rounds keys as they
are, without the Hadamard matrix that spreads their outliers.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.cpu.ops import NumbaOps
from nanovllm.kernels.fp8_rows import dequantise, quantise
from nanovllm.kernels.ops import LayerCache

TEXT = Path(__file__).with_name("perplexity.txt")
MAX_LOSS = 0.005  # relative, of eight bits


def main() -> None:
    parser = argparse.ArgumentParser(description="perplexity by the type of the KV cache")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    found = {name: perplexity(args.model, args.dtype, name) for name in ("auto", "fp8")}
    with rounding_as_they_are():
        found["fp8, not spread"] = perplexity(args.model, args.dtype, "auto", enforce_eager=True)
    print(f"{args.model}, {args.dtype}")
    for name, value in found.items():
        print(f"{name:<16}{value:8.3f}  {100 * (value / found['auto'] - 1):+.2f}%")


def perplexity(model: str, dtype: str, kv_cache_dtype: str, **others: bool) -> float:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    options = {"device": "cpu", "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    with LLM(model, **options, **others) as llm:
        (output,) = llm.generate([TEXT.read_text()], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    logprobs = [known[token].logprob for token, known in pairs if known is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


@contextlib.contextmanager
def rounding_as_they_are() -> Iterator[None]:
    """Have a plain cache keep what eight bits hold of each row; bfloat16 holds it exactly."""
    write = NumbaOps.rope_write

    def write_rounded(self: NumbaOps, *args: Any) -> None:
        write(self, *args)
        cache, cache_offsets = args[-2:]
        assert isinstance(cache, LayerCache)
        for part in cache.parts:
            rows = part.view(-1, *part.shape[2:])
            rows[cache_offsets] = dequantise(quantise(rows[cache_offsets]), part.dtype)

    with mock.patch.object(NumbaOps, "rope_write", write_rounded):
        yield


if __name__ == "__main__":
    main()
