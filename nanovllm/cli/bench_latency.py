"""`nanovllm bench latency`: what `LLM.generate` takes for batches of random prompts."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.cli.options import (
    Commands,
    add_command,
    add_engine_options,
    add_model_argument,
    append_text,
    at_least,
    engine_config,
)
from nanovllm.cli.start import load_llm
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

DESCRIPTION = """\
Measure `LLM.generate` with random prompts: the time to the first token, of a decode step and of the
whole run, at each batch size. Every number is the median of some runs after a warm-up. Weights are
random, so that only the config of a model is read; --load-format auto loads the real ones."""

EXAMPLES = """\
examples:
  nanovllm bench latency --batch 1 64
  nanovllm bench latency Qwen/Qwen3-8B --input-len 2000 --output-len 100"""


def add_parser(names: Commands) -> None:
    about, usage = "measure generate, by batch size", "nanovllm bench latency [MODEL] [options]"
    parser = add_command(names, "latency", about, usage, DESCRIPTION, EXAMPLES)
    add, count = parser.add_argument, at_least(1)
    add_model_argument(parser)
    text = "how many prompts run at once (default: 1 8)"
    add("--batch", "--batch-size", type=count, nargs="+", default=[1, 8], metavar="N", help=text)
    text = "tokens of a prompt (default: %(default)s)"
    add("--input-len", "--prompt-len", type=count, default=128, metavar="N", help=text)
    text = "tokens to generate for each (default: %(default)s)"
    add("--output-len", "--new-tokens", type=at_least(2), default=128, metavar="N", help=text)
    add("--repeats", type=count, default=3, metavar="N", help="timed runs (default: %(default)s)")
    add("--json", metavar="FILE", help="append a line of JSON for each batch size (default: none)")
    add_engine_options(parser, load_format="dummy")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    config = replace(engine_config(args), skip_tokenizer_init=True)
    config = replace(config, max_num_seqs=max(config.max_num_seqs, *args.batch))
    append_text(args.json, "")  # fails now if it cannot be written
    with load_llm(config, args.threads) as llm:
        about = {"model": config.model, "device": llm.engine.info.device_name}
        print(f"{config.model}, {llm.engine.info.dtype}, {about['device']}", flush=True)
        for batch in args.batch:
            result = measure(llm, batch, args.input_len, args.output_len, args.repeats)
            print(
                f"batch {batch}: first token after {result['first_token_ms']:.1f} ms, "
                f"{result['step_ms']:.3f} ms/step, {result['tokens_per_second']:,.1f} tok/s",
                flush=True,
            )
            append_text(args.json, json.dumps(about | result) + "\n")
    return 0


def measure(
    llm: LLM, batch: int, input_len: int, output_len: int, repeats: int
) -> dict[str, float]:
    """Return the medians of some runs; the first one warms up and does not count."""
    last_id = min(10_000, llm.engine.model_config.vocab_size)
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    runs = []
    for _ in range(repeats + 1):
        # New prompts: the prefix cache holds those of the runs before.
        prompts = [random.choices(range(last_id), k=input_len) for _ in range(batch)]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        first = max(output.time_to_first_token for output in outputs)
        step = (seconds - first) / (output_len - 1)
        runs.append((1000 * first, 1000 * step, batch * output_len / seconds))
    names = ("first_token_ms", "step_ms", "tokens_per_second")
    medians = map(statistics.median, zip(*runs[1:], strict=True))
    return {"batch": batch, "input_len": input_len, "output_len": output_len} | dict(
        zip(names, medians, strict=True)
    )
