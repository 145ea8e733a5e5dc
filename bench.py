"""Compare nanovllm, transformers and vLLM: whole runs of the same workloads, side by side.

    python bench.py --engine nanovllm transformers --model smollm2
    python bench.py --model qwen3-0.6b --load-format dummy --case mixed bs1 bs64 bs256 prefill

Every engine is measured in the same way: the time from submitting all prompts to the last token,
including prefill, reported per step (output tokens per request) or as tokens per second. Each
engine has its own process. On a CPU, whose speed fluctuates, they take turns; compare only ratios
there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
from dataclasses import dataclass

import torch

from benchmarks.engines import ENGINES, EngineProcess
from benchmarks.floors import (
    ModelCost,
    Rates,
    add_rate_options,
    decode_floor,
    model_cost,
    prefill_floor,
    rates_of,
)
from benchmarks.models import model_path
from benchmarks.report.records import (
    add_result_options,
    check_writable,
    keep,
    markdown,
    number,
    shown,
    versions_text,
)
from benchmarks.workloads import Workload, mixed, mixed_name, uniform
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least, dashed
from nanovllm.devices.cuda.memory import has_cuda
from nanovllm.errors import ConfigError
from nanovllm.models.registry import read_config_for

# Number of prompts x tokens per prompt x tokens per output.
CASES = {
    "first": "1x512x1",
    "bs1": "1x128x512",
    "bs2": "2x128x256",
    "bs4": "4x128x256",
    "bs8": "8x128x256",
    "bs64": "64x128x256",
    "bs256": "256x128x256",
    "prefill": "64x2048x1",
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    unit: str  # "tok/s" (higher is better) or "ms/step, whole run" (lower is better)
    workload: Workload
    num_units: int  # tokens or steps per run

    def value(self, seconds: float) -> float:
        return self.num_units / seconds if "tok/s" in self.unit else 1000 * seconds / self.num_units


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: list[list[float]]  # [cases][runs]
    peak_bytes: int


def main() -> int:
    args = parse_args()
    check_writable(args.json)
    path = model_path(args.model)
    checkpoint = find_checkpoint(path, need_weights=False, need_tokenizer=False)
    config = read_config_for(checkpoint.config, "auto")
    cases = [make_case(name, args, config.vocab_size) for name in args.case]
    measured = measure_all(args, [case.workload for case in cases])
    device = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    cost = model_cost(config, 4 if args.dtype == "float32" else 2)
    rates = rates_of(device, args.bandwidth, args.tflops)
    floors = [floor(case, cost, rates) for case in cases]
    print(table(cases, measured, floors))
    print(f"\n{footnote(args, cases, device)}")
    about = {"model": args.model, "device": args.device, "dtype": args.dtype}
    for name, result in measured.items():
        about |= {"engine": name, "peak_bytes": result.peak_bytes}
        for case, seconds, best in zip(cases, result.seconds, floors, strict=True):
            runs = [case.value(each) for each in seconds]
            keep(args.json, case=case.name, unit=case.unit, runs=runs, floor=best, **about)
    return 0


def make_case(name: str, args: argparse.Namespace, vocab_size: int) -> Case:
    if name == "mixed":
        sizes = args.num_seqs, args.max_input_len, args.max_output_len
        workload = mixed(vocab_size, *sizes, args.min_len, args.seed)
        return Case(mixed_name(*sizes), "tok/s", workload, workload.num_new_tokens)
    num_prompts, prompt_len, max_tokens = sizes_of(name)
    workload = uniform(vocab_size, num_prompts, prompt_len, max_tokens)
    if max_tokens > 1:
        return Case(name, "ms/step, whole run", workload, max_tokens)
    if num_prompts > 1:
        return Case(name, "prompt tok/s", workload, workload.num_prompt_tokens)
    return Case(name, "ms", workload, 1)


def sizes_of(name: str) -> list[int]:
    sizes = CASES.get(name, name).split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        known = ", ".join(["mixed", *CASES])
        raise ConfigError(f"--case {name} is neither one of {known} nor sizes such as 16x128x256")
    return [int(size) for size in sizes]


def measure_all(args: argparse.Namespace, workloads: list[Workload]) -> dict[str, Measured]:
    """Time every engine; on a GPU, one after the other, since each may use all its memory."""
    groups = [args.engine] if args.device == "cpu" else [[name] for name in args.engine]
    measured = {}
    for group in groups:
        with contextlib.ExitStack() as stack:
            engines = {}
            for name in group:
                engines[name] = EngineProcess(name, args, workloads)
                stack.callback(engines[name].hang_up)
                args.dtype = engines[name].dtype  # all engines use the first one's dtype
            rounds = [
                [[engine.run(index) for engine in engines.values()] for _ in range(args.repeats)]
                for index in range(len(workloads))
            ]  # seconds: [cases][rounds][engines]
            for position, (name, engine) in enumerate(engines.items()):
                seconds = [[each[position] for each in case] for case in rounds]
                measured[name] = Measured(seconds, engine.end())
    return measured


def floor(case: Case, cost: ModelCost, rates: Rates | None) -> float | None:
    if rates is None:
        return None
    seconds = prefill_floor(cost, rates, case.workload.prompt_lens)
    return case.value(seconds + decode_floor(cost, rates, case.workload))


def table(cases: list[Case], measured: dict[str, Measured], floors: list[float | None]) -> str:
    """Return a table of medians; in brackets, time or memory relative to the first engine."""
    header = ["", *measured, "floor"]
    rows = []
    for index, (case, best) in enumerate(zip(cases, floors, strict=True)):
        seconds = [statistics.median(each.seconds[index]) for each in measured.values()]
        cells = compared([case.value(each) for each in seconds], seconds)
        rows.append([f"{case.name}, {case.unit}", *cells, shown(best)])
    peaks = [each.peak_bytes / 1e9 for each in measured.values()]
    rows.append(["peak memory, GB", *compared(peaks, peaks), ""])
    return markdown([dict(zip(header, row, strict=True)) for row in rows])


def compared(values: list[float], costs: list[float]) -> list[str]:
    others = [
        f"{number(v)} ({cost / costs[0]:.2f}x)" for v, cost in zip(values, costs, strict=True)
    ]
    return [number(values[0]), *others[1:]]


def footnote(args: argparse.Namespace, cases: list[Case], device: str) -> str:
    weights = "random weights" if args.load_format == "dummy" else "real weights"
    text = f"{args.model}, {weights}, {args.dtype}, {device}, {versions_text()}. Medians of "
    text += f"{args.repeats} whole runs after a warm-up."
    for case in cases:
        work = case.workload
        text += f" {case.name}: {len(work.prompts)} prompts, {work.num_prompt_tokens:,} tokens in, "
        text += f"{work.num_new_tokens:,} out."
    return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, count = parser.add_argument, at_least(1)
    text = f"one or more of {', '.join(ENGINES)} (default: nanovllm)"
    add("--engine", nargs="+", choices=ENGINES, default=["nanovllm"], metavar="NAME", help=text)
    text = "mixed, sized by the options below; "
    text += ", ".join(f"{name} ({sizes})" for name, sizes in CASES.items())
    text += "; or other sizes: prompts x prompt tokens x output tokens"
    add("--case", nargs="+", metavar="NAME", help=f"{text} (default: mixed first)")
    add("--model", default="smollm2", help="folder, .gguf file or hub id (default: smollm2)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    text = "auto: the first engine chooses, and the others use the same (default: auto)"
    add("--dtype", default="auto", help=text)
    add("--load-format", default="auto", help="dummy: random weights, no download (default: auto)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (default: 0.6)")
    add("--seed", type=int, default=0, help="seed of the mixed prompts and lengths (default: 0)")
    add("--num-seqs", type=count, help="number of mixed prompts (default: 256, on a CPU 16)")
    add("--max-input-len", type=count, help="of mixed prompts (default: 1024, on a CPU 256)")
    add("--max-output-len", type=count, help="of mixed outputs (default: the same)")
    add("--tensor-parallel-size", type=count, default=1, help="devices to shard over (default: 1)")
    add("--hf-batch", type=count, help="batch size of transformers (default: all)")
    add_result_options(parser)
    add_rate_options(parser)
    return complete(parser.parse_args(dashed(sys.argv[1:])))


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults that depend on the device; reject what cannot run before loading."""
    if args.device == "auto":
        args.device = "cuda" if has_cuda() else "cpu"
    num_seqs, args.min_len, max_len = (16, 16, 256) if args.device == "cpu" else (256, 100, 1024)
    args.num_seqs = args.num_seqs or num_seqs
    args.max_input_len = args.max_input_len or max_len
    args.max_output_len = args.max_output_len or max_len
    args.case = args.case or ["mixed", "first"]
    if "transformers" in args.engine and args.tensor_parallel_size > 1:
        raise ConfigError("--engine transformers runs on one device; drop --tensor-parallel-size")
    if "vllm" in args.engine and importlib.util.find_spec("vllm") is None:
        raise ConfigError("--engine vllm needs vLLM: pip install vllm")
    return args


if __name__ == "__main__":
    sys.exit(exit_code(main))
