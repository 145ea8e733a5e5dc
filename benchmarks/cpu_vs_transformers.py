"""nanovllm against transformers' `generate` on the CPU: same weights, threads and machine, one run.

    python -m benchmarks.cpu_vs_transformers            # all three parts, about four minutes

Times on a CPU mean little by themselves, so only ratios are claimed. Runs of both sides alternate
and each side is represented by its median.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.gguf import list_tensors

DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["single", "batch", "prefix", "all"], default="all")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, SmolLM2-135M-Instruct")
    for name, part in (("single", single), ("batch", batch), ("prefix", prefix)):
        if args.part in (name, "all"):
            part(args.repeats)


def single(repeats: int) -> None:
    """One request: 32 prompt tokens, 128 new ones, greedy."""
    prompt = random.Random(0).choices(range(1000, 40000), k=32)
    speeds: dict[str, float] = {}
    for dtype in DTYPES:
        model = load_transformers(dtype)
        params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
        with LLM("smollm2", dtype=dtype, enable_prefix_caching=False) as llm:
            ours, theirs = alternate(
                lambda llm=llm, p=params: llm.generate([prompt], p, use_tqdm=False),
                lambda model=model: hf_generate(model, [prompt], 128),
                repeats,
            )
        speeds[f"nanovllm {dtype}"], speeds[f"transformers {dtype}"] = 128 / ours, 128 / theirs
        print(f"single {dtype}: {128 / ours:.1f} against {128 / theirs:.1f} tok/s", end=", ")
        print(f"{theirs / ours:.2f}x (bar: 1.3x)")
    best = [max(v for k, v in speeds.items() if k.startswith(e)) for e in ("nano", "trans")]
    print(f"single, better dtype of each: {best[0]:.1f} against {best[1]:.1f} tok/s", end=", ")
    print(f"{best[0] / best[1]:.2f}x (bar: 2x)")


def batch(repeats: int) -> None:
    """16 requests, prompts and outputs of 16 to 256 tokens; transformers pads on the left."""
    rng = random.Random(0)
    prompts = [rng.choices(range(1000, 40000), k=rng.randint(16, 256)) for _ in range(16)]
    lengths = [rng.randint(16, 256) for _ in prompts]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for dtype in DTYPES:
        model = load_transformers(dtype)
        with LLM("smollm2", dtype=dtype, enable_prefix_caching=False) as llm:
            ours, theirs = alternate(
                lambda llm=llm: llm.generate(prompts, params, use_tqdm=False),
                lambda model=model: hf_generate(model, prompts, max(lengths)),
                repeats,
            )
        useful = sum(lengths)
        speeds["ours"].append(useful / ours)
        speeds["theirs"].append(useful / theirs)
        print(f"batch of 16, {dtype}: {useful / ours:.1f} against {useful / theirs:.1f}", end=" ")
        print(f"useful tok/s, {theirs / ours:.2f}x (bar: 3x)")
    ratio = max(speeds["ours"]) / max(speeds["theirs"])
    print(f"batch of 16, better dtype of each: {ratio:.2f}x")


def prefix(repeats: int) -> None:
    """Time to first token of a request that shares a 1,000-token prefix with an earlier one."""
    rng = random.Random(0)
    with LLM("smollm2") as llm:
        ratios = []
        for _ in range(repeats):
            shared = rng.choices(range(1000, 40000), k=1000)
            tails = [rng.choices(range(1000, 40000), k=20) for _ in range(2)]
            params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            first, second = (
                llm.generate([shared + tail], params, use_tqdm=False)[0] for tail in tails
            )
            assert second.num_cached_tokens >= 960
            ratios.append(first.time_to_first_token / second.time_to_first_token)
    print(f"shared prefix: first token {statistics.median(ratios):.1f}x sooner (bar: 5x)")


def load_transformers(dtype: str) -> LlamaForCausalLM:
    """Build the transformers model from the very weights nanovllm loads."""
    checkpoint = find_checkpoint("smollm2")
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    tensors = {
        tensor.name: torch.from_numpy(np.concatenate(list(tensor.read())))
        for tensor in list_tensors(checkpoint.path)
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.to(getattr(torch, dtype)).eval()


@torch.inference_mode()
def hf_generate(model: LlamaForCausalLM, prompts: list[list[int]], max_tokens: int) -> None:
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    model.generation_config.eos_token_id = None
    model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)


def alternate(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Run both sides in turn after a warm-up; return the median seconds of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for side, run in enumerate((ours, theirs)):
            start = time.perf_counter()
            run()
            if repeat:
                times[side].append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main()
