"""One workload of random prompts, run by nanovllm, transformers or vllm: whichever is installed."""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nanovllm.bench.options import at_least
from nanovllm.checkpoint.find import ALIASES, find_checkpoint
from nanovllm.checkpoint.gguf import list_tensors
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import dashed
from nanovllm.errors import ConfigError
from nanovllm.models.registry import read_config
from nanovllm.platforms import create_platform

TEMPERATURE = 0.6
WARM_UP = [1, 2, 3, 4]


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: list[list[int]]
    max_tokens: list[int]  # per prompt; the end-of-sequence token does not end an answer

    def sampling_params(self, params: Any) -> list[Any]:
        """vLLM's SamplingParams and ours are spelled alike."""
        options = {"temperature": TEMPERATURE, "ignore_eos": True}
        return [params(max_tokens=max_tokens, **options) for max_tokens in self.max_tokens]


@dataclass(frozen=True, slots=True)
class Result:
    num_tokens: int  # that were asked for: what a padded batch computes beyond does not count
    seconds: float
    time_to_first_token: float | None  # seconds, mean over the prompts
    dtype: str
    peak_bytes: int


def main() -> int:
    args = parse_args()
    workload = make_workload(args)
    result = args.run(args, workload)
    assert result.num_tokens == sum(workload.max_tokens), "an answer has the wrong length"
    report(args, workload, result)
    return 0


def make_workload(args: argparse.Namespace) -> Workload:
    checkpoint = find_checkpoint(args.model, need_weights=False, need_tokenizer=False)
    last_id = min(10000, checkpoint.config["vocab_size"] - 1)
    rng = random.Random(args.seed)
    lengths = [rng.randint(args.min_len, args.max_input_len) for _ in range(args.num_seqs)]
    prompts = [[rng.randint(0, last_id) for _ in range(length)] for length in lengths]
    return Workload(prompts, [rng.randint(args.min_len, args.max_output_len) for _ in prompts])


def run_nanovllm(args: argparse.Namespace, workload: Workload) -> Result:
    from nanovllm import LLM, SamplingParams

    names = ("device", "dtype", "load_format", "tensor_parallel_size")
    options = {name: getattr(args, name) for name in names}
    max_model_len = args.max_input_len + args.max_output_len
    with LLM(args.model, max_model_len=max_model_len, skip_tokenizer_init=True, **options) as llm:
        llm.generate(WARM_UP, SamplingParams(max_tokens=4), use_tqdm=False)
        start = time.perf_counter()
        params = workload.sampling_params(SamplingParams)
        outputs = llm.generate(workload.prompts, params, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - start
        num_tokens = sum(len(output.token_ids) for output in outputs)
        first = sum(output.time_to_first_token for output in outputs) / len(outputs)
        peak = peak_memory(args.device)  # a GPU's, while it is in use
    # Only workers that have ended are counted on a CPU.
    peak = max(peak, peak_memory(args.device))
    return Result(num_tokens, seconds, first, llm.engine.info.dtype, peak)


def run_transformers(args: argparse.Namespace, workload: Workload) -> Result:
    """One left-padded batch, as `generate` takes it: all rows run until the longest answer ends."""
    model = load_transformers(args)
    generate_batch(model, [WARM_UP], max_tokens=4)
    times: list[float] = []  # of the prompts, then of every token
    streamer = SimpleNamespace(put=lambda ids: times.append(time.perf_counter()), end=lambda: None)
    start = time.perf_counter()
    output = generate_batch(model, workload.prompts, max(workload.max_tokens), streamer=streamer)
    num_new = output.shape[1] - max(map(len, workload.prompts))
    seconds = time.perf_counter() - start
    num_tokens = sum(min(num_new, max_tokens) for max_tokens in workload.max_tokens)
    dtype = str(model.dtype).removeprefix("torch.")
    return Result(num_tokens, seconds, times[1] - start, dtype, peak_memory(args.device))


def load_transformers(args: argparse.Namespace) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if args.tensor_parallel_size > 1:
        raise ConfigError("--engine transformers runs on one device, not on --tensor-parallel-size")

    is_dummy = args.load_format == "dummy"
    checkpoint = find_checkpoint(args.model, need_weights=not is_dummy, need_tokenizer=False)
    dtype = read_config(checkpoint.config).dtype if args.dtype == "auto" else args.dtype
    if checkpoint.weight_format in ("safetensors", "bin"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype)
    else:
        config = AutoConfig.for_model(**checkpoint.config)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if checkpoint.weight_format == "gguf":  # transformers itself would need one more package
        stored = list_tensors(checkpoint.weight_files[0])
        weights = {each.name: torch.from_numpy(np.concatenate([*each.read()])) for each in stored}
        model.load_state_dict(weights, strict=False)
    return model.to(args.device).eval()


def generate_batch(
    model: Any, prompts: list[list[int]], max_tokens: int, **options: Any
) -> torch.Tensor:
    paddings = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    rows = [[0] * num + prompt for num, prompt in zip(paddings, prompts, strict=True)]
    mask = [[0] * num + [1] * len(prompt) for num, prompt in zip(paddings, prompts, strict=True)]
    return model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        min_new_tokens=max_tokens,  # ignores the end-of-sequence token
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        **options,
    )


def run_vllm(args: argparse.Namespace, workload: Workload) -> Result:
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise ConfigError(f"--engine vllm needs vLLM (pip install vllm): {error}") from error
    name, _ = ALIASES.get(args.model, (args.model, None))
    max_model_len = args.max_input_len + args.max_output_len
    names = ("dtype", "load_format", "tensor_parallel_size")
    options = {option: getattr(args, option) for option in names}
    llm = LLM(name, max_model_len=max_model_len, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt in [WARM_UP, *workload.prompts]]
    llm.generate(prompts[:1], SamplingParams(max_tokens=4), use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts[1:], workload.sampling_params(SamplingParams))
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Result(num_tokens, seconds, None, args.dtype, peak_memory(args.device))


def report(args: argparse.Namespace, workload: Workload, result: Result) -> None:
    first = result.time_to_first_token
    rows = {
        "engine": f"{args.engine}, {args.model}, {args.device}, {result.dtype}",
        "prompts": f"{len(workload.prompts)}, {sum(map(len, workload.prompts)):,} tokens",
        "output": f"{result.num_tokens:,} tokens in {result.seconds:.2f} s",
        "speed": f"{result.num_tokens / result.seconds:,.1f} tok/s",
        "first token": "not reported" if first is None else f"after {first:.3f} s on average",
        "peak memory": f"{result.peak_bytes / 1e9:.2f} GB",
    }
    print("\n".join(f"{name:<14}{value}" for name, value in rows.items()))


def peak_memory(device: str) -> int:
    """Bytes in use on the (first) GPU, or the largest RSS of this process or one of its workers."""
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        return total - free
    unit = 1 if sys.platform == "darwin" else 1024
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in processes) * unit


def parse_args() -> argparse.Namespace:
    engines = {"nanovllm": run_nanovllm, "transformers": run_transformers, "vllm": run_vllm}
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--engine", choices=engines, default="nanovllm", help="default: nanovllm")
    add("--model", default="smollm2", help="folder, .gguf file or hub id (default: smollm2)")
    add("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    add("--dtype", default="auto", help="default: auto, each engine's own choice")
    add("--load-format", default="auto", help="dummy: random weights, no download (default: auto)")
    add("--seed", type=int, default=0, help="of the prompts and lengths (default: 0)")
    count = at_least(1)
    add("--num-seqs", type=count, help="prompts (default: 256, on a CPU 16)")
    add("--max-input-len", type=count, help="tokens (default: 1024 and at least 100; CPU 256, 16)")
    add("--max-output-len", type=count, help="the same for the answers")
    add("--tensor-parallel-size", type=count, default=1, help="devices to split over (default: 1)")
    args = parser.parse_args(dashed(sys.argv[1:]))
    args.run = engines[args.engine]
    if args.device == "auto":
        args.device = create_platform("auto").device.type
    num_seqs, min_len, max_len = (16, 16, 256) if args.device == "cpu" else (256, 100, 1024)
    args.num_seqs = args.num_seqs or num_seqs
    args.max_input_len = args.max_input_len or max_len
    args.max_output_len = args.max_output_len or max_len
    args.min_len = min(min_len, args.max_input_len, args.max_output_len)
    return args


if __name__ == "__main__":
    sys.exit(exit_code(main))
