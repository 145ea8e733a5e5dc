"""Compare a GGUF file kept quantized, dequantized to bfloat16, and in llama.cpp, in turns.

    python -m benchmarks.engine.gguf_peers [--llama PYTHON [--q4-0 FILE]] [--threads 2]
        [--rounds 5] [--load "1 request"]

PYTHON is the interpreter of an environment with llama-cpp-python, built from source for this CPU
(pip install --no-binary llama-cpp-python llama-cpp-python); without it, only the first two are
compared. With --q4-0, llama.cpp's quantizer first writes the model as Q4_0 to FILE, which is then
compared: llama.cpp has faster ("repacked") kernels for it.

Each side has its own process, which waits while another one works. There are three loads: one
request with 16 prompt and 64 output tokens, 16 such requests at once, and a prompt of 512 tokens.
Prints the median throughput and how many times as fast the quantized file is, by wall-clock time
and by CPU time, which is more reliable on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from nanovllm.cli.options import at_least

LLAMA_SIDE = Path(__file__).with_name("llama_side.py")
# Number of requests, tokens per prompt, new tokens per request.
LOADS = {"1 request": (1, 16, 64), "16 requests": (16, 16, 64), "512-token prompt": (1, 512, 1)}
NUM_IDS = 10_000  # prompts are drawn from these token ids
Times = dict[str, float]


def main() -> None:
    args = parse_args()
    if args.side is not None:
        serve_side(args)
        return
    if args.q4_0 is not None:
        command = [args.llama, str(LLAMA_SIDE), find_file(args.model), args.q4_0]
        subprocess.run(command, check=True)
        args.model = args.q4_0
    commands = {side: _own_command(side, args) for side in ("stored", "bfloat16")}
    if args.llama is not None:
        commands["llama.cpp"] = [args.llama, str(LLAMA_SIDE), find_file(args.model)]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    sides = {side: Side(command, environment) for side, command in commands.items()}
    try:
        for name in args.load or LOADS:
            num_requests, prompt_len, num_new = LOADS[name]
            times: dict[str, list[Times]] = {side: [] for side in sides}
            for round_number in range(args.rounds + 1):  # the first round is a warm-up
                prompts = draw_prompts(num_requests, prompt_len, seed=round_number)
                for side, process in sides.items():
                    taken = process.ask({"prompts": prompts, "num_new": num_new})
                    times[side] += [taken] * (round_number > 0)
            print(summarize(name, times, num_requests * max(num_new, prompt_len)), flush=True)
    finally:
        for process in sides.values():
            process.close()


class Side:
    """A process that reads a load as a line of JSON, and writes the seconds it took."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, load: dict[str, Any]) -> Times:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended: exit code {self._process.wait()}")
        times: Times = json.loads(line)
        return times

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # ends the process
        self._process.wait()


def draw_prompts(num_requests: int, prompt_len: int, seed: int) -> list[list[int]]:
    """Draw new ids for every round, so that no prompt is cached."""
    numbers = random.Random(f"{num_requests} {prompt_len} {seed}")
    return [[numbers.randrange(NUM_IDS) for _ in range(prompt_len)] for _ in range(num_requests)]


def summarize(name: str, times: dict[str, list[Times]], num_tokens: int) -> str:
    """Return each side's tokens per second, and its time as a multiple of the first side's."""
    lines = [f"{name}:"]
    medians = {
        side: {
            clock: statistics.median(taken[clock] for taken in all_taken) for clock in all_taken[0]
        }
        for side, all_taken in times.items()
    }
    first = next(iter(medians.values()))
    for side, seconds in medians.items():
        ratios = ", ".join(f"{seconds[clock] / first[clock]:.2f}x by {clock}" for clock in seconds)
        speed = num_tokens / seconds["clock"]
        lines.append(f"  {side:10s} {speed:8.1f} tok/s; stored is {ratios}")
    return "\n".join(lines)


def serve_side(args: argparse.Namespace) -> None:
    """Run the loads from standard input in this process."""
    from nanovllm import LLM, SamplingParams
    from nanovllm.worker import check_model, load_model

    options = {"max_num_seqs": 16, "max_model_len": 1024, "enable_prefix_caching": False}
    if args.side == "stored":
        llm = LLM(args.model, **options)
    else:
        patches = [
            mock.patch.object(module, "choose_layouts", return_value=None)
            for module in (check_model, load_model)
        ]
        with patches[0], patches[1]:
            llm = LLM(args.model, dtype="bfloat16", **options)
    for line in sys.stdin:
        load = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=load["num_new"], ignore_eos=True)
        clock, cores = time.perf_counter(), time.process_time()
        llm.generate(load["prompts"], params, use_tqdm=False)
        taken = {"clock": time.perf_counter() - clock, "cores": time.process_time() - cores}
        print(json.dumps(taken), flush=True)


def find_file(model: str) -> str:
    from nanovllm.checkpoint.find import find_checkpoint

    return str(find_checkpoint(model).weight_files[0])


def _own_command(side: str, args: argparse.Namespace) -> list[str]:
    module = "benchmarks.engine.gguf_peers"
    return [sys.executable, "-m", module, "--side", side, "--model", args.model]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a GGUF file")
    parser.add_argument(
        "--llama", metavar="PYTHON", help="an interpreter that can import llama_cpp"
    )
    parser.add_argument("--q4-0", metavar="FILE", help="compare Q4_0 weights, written to FILE")
    parser.add_argument("--threads", type=at_least(1), default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--load", choices=LOADS, action="append", help="(default: all)")
    parser.add_argument("--side", choices=("stored", "bfloat16"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.q4_0 is not None and args.llama is None:
        parser.error("--q4-0 needs --llama, whose quantizer writes the file")
    return args


if __name__ == "__main__":
    main()
