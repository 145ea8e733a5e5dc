"""nanovllm against transformers' `generate`: speed, first token and memory, as a markdown table.

    python -m benchmarks.compare_transformers --model qwen3-0.6b
    python -m benchmarks.compare_transformers --model smollm2 --num-seqs 8 --max-len 64   # on a CPU

Both have random weights of the same shapes, dtype and device, and get the same requests. nanovllm
batches continuously; `generate` gets left-padded batches that run until their longest answer is
done, of which only the tokens asked for count. Each side runs in a process of its own, and
nanovllm's slots and KV pool are those that the requests need: otherwise the pool takes what the
memory allows.
The floor is what the device could do at best; on an H200 all of it takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import torch

from nanovllm.bench.commands import Bench, open_llm
from nanovllm.bench.models import model_path
from nanovllm.bench.options import (
    add_engine_options,
    add_floor_options,
    add_result_options,
    at_least,
)
from nanovllm.bench.report import append, installed, number
from nanovllm.bench.runner import TEMPERATURE, measure
from nanovllm.bench.workloads import Workload, mixed, uniform
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import dashed
from nanovllm.cli.start import configure_logging
from nanovllm.config import EngineConfig

FIRST_TOKEN_PROMPT_LEN = 512
NUM_WARM_UP_TOKENS = 8  # of each answer, by `generate`


@dataclass(frozen=True, slots=True)
class Floor:
    """What the device cannot exceed, whatever runs on it."""

    tokens_per_second: float
    first_token_ms: float


@dataclass(frozen=True, slots=True)
class Measured:
    engine: str
    device: str
    dtype: str
    tokens_per_second: list[float]  # by run; new tokens that were asked for
    first_token_ms: list[float]  # by run; of one prompt that runs alone
    peak_gb: float
    device_name: str = ""
    floor: Floor | None = None


def main() -> int:
    args = parse_args()
    configure_logging(args.verbose)
    if args.json:
        append(args.json, "")
    ours = in_own_process(run_nanovllm, args)
    theirs = in_own_process(run_transformers, args, ours.device, ours.dtype)
    text = f"{table(ours, theirs)}\n\n{footnote(args, ours)}"
    print(text)
    if args.json:
        append(args.json, compare_line(args.model, ours, theirs, text))
    return 0


def compare_line(model: str, ours: Measured, theirs: Measured, text: str) -> str:
    """A line of JSON like the other benchmarks': how many times as fast, and all the rest."""
    speeds = [statistics.median(side.tokens_per_second) for side in (ours, theirs)]
    record = {
        "case": "compare",
        "unit": "x transformers",
        "runs": ours.tokens_per_second,
        "floor": None,
        "value": speeds[0] / speeds[1],
        "text": text,
        "sides": [asdict(ours), asdict(theirs)],
        "model": model,
        "device": ours.device,
        "versions": installed(),
    }
    return json.dumps(record) + "\n"


def make_workloads(args: argparse.Namespace) -> tuple[Workload, Workload]:
    """The requests whose speed is measured, and the one whose first token is."""
    vocab_size = read_config(args.model)["vocab_size"]
    alone = uniform(vocab_size, 1, min(FIRST_TOKEN_PROMPT_LEN, args.max_len), 1)
    return mixed(vocab_size, args.num_seqs, args.max_len), alone


def read_config(model: str) -> dict[str, Any]:
    checkpoint = find_checkpoint(model_path(model), need_weights=False, need_tokenizer=False)
    return dict(checkpoint.config)


def in_own_process(run: Callable[..., Measured], *arguments: Any) -> Measured:
    """A fresh process: the other side's memory and compiled kernels are not there."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


def run_nanovllm(args: argparse.Namespace) -> Measured:
    workload, alone = make_workloads(args)
    block_size = EngineConfig("").kvcache_block_size
    totals = map(sum, zip(workload.prompt_lens, workload.max_tokens, strict=True))
    num_blocks = sum(-(-total // block_size) for total in totals)
    args.max_model_len = min(args.max_model_len, max(workload.longest, alone.longest))
    with open_llm(args, num_kvcache_blocks=num_blocks, max_num_seqs=args.num_seqs) as llm:
        passes = measure(llm, workload, args.repeats)
        firsts = measure(llm, alone, args.repeats)
        info = llm.engine.info
        return Measured(
            "nanovllm",
            info.device,
            info.dtype,
            [workload.num_new_tokens / timing.seconds for timing in passes],
            [1000 * timing.first_token_seconds for timing in firsts],
            peak_gb(info.device),
            info.device_name,
            make_floor(Bench(llm, args), workload, alone),
        )


def make_floor(bench: Bench, workload: Workload, alone: Workload) -> Floor | None:
    if bench.setup.rates is None:
        return None
    seconds = bench.prefill_floor(workload) + bench.decode_floor(workload)
    return Floor(workload.num_new_tokens / seconds, 1000 * bench.prefill_floor(alone))


def run_transformers(args: argparse.Namespace, device: str, dtype: str) -> Measured:
    workload, alone = make_workloads(args)
    model = make_transformers_model(args.model, device, dtype)
    batches = split(workload, args.hf_batch or args.num_seqs)
    generate(model, [replace(batch, max_tokens=[NUM_WARM_UP_TOKENS]) for batch in batches])
    passes = [seconds(lambda: generate(model, batches)) for _ in range(args.repeats)]
    generate(model, [alone])
    firsts = [seconds(lambda: generate(model, [alone])) for _ in range(args.repeats)]
    return Measured(
        "transformers",
        device,
        dtype,
        [workload.num_new_tokens / taken for taken in passes],
        [1000 * taken for taken in firsts],
        peak_gb(device),
    )


def make_transformers_model(name: str, device: str, dtype: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**read_config(name))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None  # as ignore_eos does
    return model


def split(workload: Workload, size: int) -> list[Workload]:
    starts = range(0, len(workload.prompts), size)
    return [
        Workload(workload.prompts[i : i + size], workload.max_tokens[i : i + size]) for i in starts
    ]


def generate(model: Any, batches: list[Workload]) -> None:
    for batch in batches:
        width, max_tokens = max(batch.prompt_lens), max(batch.max_tokens)
        rows = [[0] * (width - len(prompt)) + prompt for prompt in batch.prompts]
        mask = [[0] * (width - length) + [1] * length for length in batch.prompt_lens]
        output = model.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        )
        assert output.cpu().shape[1] == width + max_tokens  # on the host: the device is done


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_gb(device: str) -> float:
    """What torch took from the device, graphs included, or this process's largest RSS."""
    if device != "cpu":
        return torch.cuda.max_memory_reserved() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def table(ours: Measured, theirs: Measured) -> str:
    """Medians of the runs; the ratio is how much better nanovllm is."""
    speeds = [statistics.median(side.tokens_per_second) for side in (ours, theirs)]
    firsts = [statistics.median(side.first_token_ms) for side in (ours, theirs)]
    peaks = [ours.peak_gb, theirs.peak_gb]
    floors = ["", ""]
    if ours.floor is not None:
        floors = [number(ours.floor.tokens_per_second), number(ours.floor.first_token_ms)]
    rows = [
        ("throughput, tok/s", speeds, speeds[0] / speeds[1], floors[0]),
        ("time to first token, ms", firsts, firsts[1] / firsts[0], floors[1]),
        ("peak memory, GB", peaks, peaks[1] / peaks[0], ""),
    ]
    lines = ["| | nanovllm | transformers | better by | floor |", "|---|---|---|---|---|"]
    for name, values, ratio, floor in rows:
        lines.append(f"| {name} | {' | '.join(map(number, values))} | {ratio:.2f}x | {floor} |")
    return "\n".join(lines)


def footnote(args: argparse.Namespace, ours: Measured) -> str:
    workload, alone = make_workloads(args)
    packages = {**installed(), "transformers": version("transformers")}
    versions = ", ".join(f"{name} {release}" for name, release in packages.items())
    return (
        f"{args.model}, random weights, {ours.dtype}, {ours.device_name}, {versions}. "
        f"{args.num_seqs} requests, {workload.num_prompt_tokens:,} prompt tokens, "
        f"{workload.num_new_tokens:,} new ones. First token: one prompt of "
        f"{alone.num_prompt_tokens} tokens, alone. Medians of {args.repeats} runs."
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--num-seqs", type=at_least(1), default=64, help="requests (default: %(default)s)")
    add("--max-len", type=at_least(1), default=512, help="of each part (default: %(default)s)")
    add("--hf-batch", type=at_least(1), help="prompts per padded batch (default: all in one)")
    add_engine_options(parser)
    add_floor_options(parser)
    add_result_options(parser)
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
