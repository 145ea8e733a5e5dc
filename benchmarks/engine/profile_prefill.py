"""Where the time of a prefill step goes, kernel by kernel.

    python -m benchmarks.engine.profile_prefill [--model qwen3-0.6b]

Needs CUDA.
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.bench.models import model_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--num-seqs", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=2048)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    with LLM(
        model_path(args.model), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True
    ) as llm:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        for is_profiled in (False, True):
            shape = (args.num_seqs, args.prompt_len)
            prompts = torch.randint(0, 10000, shape, generator=generator).tolist()
            if not is_profiled:
                llm.generate(prompts, params, use_tqdm=False)
                continue
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                llm.generate(prompts, params, use_tqdm=False)
                torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=16)
    for line in table.splitlines():
        print(line[:60], line[-110:])


if __name__ == "__main__":
    main()
