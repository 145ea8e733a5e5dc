"""Pipeline depth 0 against 1 on the CPU, where a step runs inside `submit`.

    python -m benchmarks.engine.cpu_depth

The platform's default is the faster one.
"""

from __future__ import annotations

import random
import statistics
import time

from nanovllm import LLM, SamplingParams


def main() -> None:
    rng = random.Random(0)
    prompts = [rng.choices(range(1000, 40000), k=rng.randint(16, 128)) for _ in range(16)]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randint(16, 128), ignore_eos=True)
        for _ in prompts
    ]
    engines = {depth: LLM("smollm2", depth=depth, enable_prefix_caching=False) for depth in (0, 1)}
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for repeat in range(6):
        for depth, llm in engines.items():
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if repeat:
                seconds[depth].append(time.perf_counter() - start)
    num_tokens = sum(param.max_tokens for param in params)
    for depth, times in seconds.items():
        print(f"depth {depth}: {num_tokens / statistics.median(times):.1f} tok/s")


if __name__ == "__main__":
    main()
