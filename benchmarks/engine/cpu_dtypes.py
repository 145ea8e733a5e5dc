"""bfloat16 against float32 on this CPU: decoding, and a prompt of 1,000 tokens.

    python -m benchmarks.engine.cpu_dtypes

dtype="auto" keeps a checkpoint in bfloat16 where decoding gains and the prompt loses at most a
tenth. The engines take turns; the best round of each counts, by the clock and by the time of the
cores, which says more where others keep them busy.
"""

from __future__ import annotations

import argparse
import random
import time

from nanovllm import LLM, SamplingParams
from nanovllm.platforms.cpu_features import find_cpu_features

DTYPES = ("float32", "bfloat16")
NUM_PROMPT_TOKENS = 1000
NUM_NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(find_cpu_features())
    engines = {
        dtype: LLM(args.model, dtype=dtype, enable_prefix_caching=False, max_model_len=1200)
        for dtype in DTYPES
    }
    prompt = random.Random(0).choices(range(1000, 40000), k=NUM_PROMPT_TOKENS)
    report("prompt of 1,000 tokens", engines, prompt, 1, args.rounds)
    report("64 tokens at batch 1", engines, prompt[:8], NUM_NEW_TOKENS, args.rounds)


def report(
    what: str, engines: dict[str, LLM], prompt: list[int], max_tokens: int, num_rounds: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    clocks = {"clock": time.perf_counter, "cores": time.process_time}
    best = {(clock, dtype): float("inf") for clock in clocks for dtype in engines}
    for _ in range(num_rounds):
        for dtype, llm in engines.items():
            starts = {clock: read() for clock, read in clocks.items()}
            llm.generate(prompt, params, use_tqdm=False)
            for clock, read in clocks.items():
                best[clock, dtype] = min(best[clock, dtype], read() - starts[clock])
    for clock in clocks:
        times = ", ".join(f"{dtype} {best[clock, dtype] * 1e3:.0f} ms" for dtype in engines)
        ratio = best[clock, "bfloat16"] / best[clock, "float32"]
        print(f"{what}, by the {clock}: {times}; bfloat16 takes {ratio:.2f} of float32")


if __name__ == "__main__":
    main()
