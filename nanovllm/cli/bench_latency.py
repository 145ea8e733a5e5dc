"""Measure the speed of `LLM.generate` with random prompts at several batch sizes.

Reports the time to first token, the time of a decode step and the throughput, as medians over
several runs after a warm-up. By default, weights are random and only the model's config is read;
--load-format auto loads the real weights.

examples:
  nanovllm bench latency --batch 1 64
  nanovllm bench latency Qwen/Qwen3-8B --input-len 2000 --output-len 100
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.cli import options
from nanovllm.cli.start import load_llm
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import option

if TYPE_CHECKING:
    from nanovllm.llm import LLM


COUNT = options.at_least(1)


@dataclass(frozen=True, slots=True)
class Sizes:
    batch: tuple[int, ...] = option((1, 8), "prompts per batch", parse=COUNT, alias="--batch-size")
    input_len: int = option(128, "tokens per prompt", parse=COUNT, alias="--prompt-len")
    output_len: int = option(
        128, "tokens to generate", parse=options.at_least(2), alias="--new-tokens"
    )
    repeats: int = option(3, "timed runs, after one warm-up run", parse=COUNT)
    json: str | None = option(None, "file to which a JSON line is appended for each batch size")


def add_parser(names: options.Commands) -> None:
    about, usage = "measure LLM.generate by batch size", "nanovllm bench latency [MODEL] [options]"
    parser = options.add_command(names, "latency", about, usage, __doc__)
    options.add_model_argument(parser)
    options.add_options(parser, "sizes", Sizes)
    options.add_engine_options(parser, load_format="dummy")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    sizes = Sizes(**options.fields_in(args, Sizes))
    options.append_json(sizes.json)
    with start_llm(args, min_num_seqs=max(sizes.batch)) as (llm, about):
        for batch in sizes.batch:
            lengths = sizes.input_len, sizes.output_len
            result = measure(llm, batch, *lengths, sizes.repeats)
            print(
                f"batch {batch}: first token after {result['first_token_ms']:.1f} ms, "
                f"{result['step_ms']:.3f} ms/step, {result['tokens_per_second']:,.1f} tok/s",
                flush=True,
            )
            options.append_json(sizes.json, about | result)
    return 0


@contextlib.contextmanager
def start_llm(
    args: argparse.Namespace, min_num_seqs: int = 1
) -> Iterator[tuple[LLM, dict[str, str]]]:
    """Start an engine without a tokenizer; yield it, and the description that results include."""
    config = replace(options.engine_config(args), skip_tokenizer_init=True)
    config = replace(config, max_num_seqs=max(config.max_num_seqs, min_num_seqs))
    with load_llm(config, args.threads) as llm:
        info = llm.engine.info
        about = {"model": config.model, "device": info.device_name, "dtype": info.dtype}
        print(", ".join(about.values()), flush=True)
        yield llm, about


def measure(
    llm: LLM,
    batch: int,
    input_len: int,
    output_len: int,
    repeats: int,
    joules: Callable[[], float] | None = None,
) -> dict[str, float]:
    """Return the medians of `repeats` runs, which follow one warm-up run.

    If a counter of `joules` is given, they include the energy per output token.
    """
    last_id = min(10_000, llm.engine.model_config.vocab_size)
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    from tqdm import tqdm

    runs = []
    for _ in tqdm(range(repeats + 1), f"batch {batch}", unit="run", leave=False):
        # Use new prompts: those of earlier runs are in the prefix cache.
        prompts = [random.choices(range(last_id), k=input_len) for _ in range(batch)]
        joules_before = joules() if joules else 0.0
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        first = max(output.time_to_first_token for output in outputs)
        run = {
            "first_token_ms": 1000 * first,
            "step_ms": 1000 * (seconds - first) / (output_len - 1),
            "tokens_per_second": batch * output_len / seconds,
        }
        if joules:
            run["joules_per_token"] = (joules() - joules_before) / (batch * output_len)
        runs.append(run)
    medians = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}
    return {"batch": batch, "input_len": input_len, "output_len": output_len} | medians
