"""Measure the throughput of `LLM.generate` with many random prompts, as medians over several runs.

By default, weights are random and only the model's config is read; --load-format auto loads the
real weights.

examples:
  nanovllm bench throughput --num-prompts 64
  nanovllm bench throughput Qwen/Qwen3-8B --input-len 1000 --output-len 200 --energy
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from nanovllm.cli import options
from nanovllm.cli.bench_latency import COUNT, measure, start_llm
from nanovllm.validation import option


@dataclass(frozen=True, slots=True)
class Sizes:
    num_prompts: int = option(64, "prompts per run", parse=COUNT)
    input_len: int = option(128, "tokens per prompt", parse=COUNT, alias="--prompt-len")
    output_len: int = option(128, "tokens to generate per prompt", parse=options.at_least(2))
    repeats: int = option(3, "timed runs, after one warm-up run", parse=COUNT)
    energy: bool = option(False, "also measure the energy of the GPUs per output token")
    json: str | None = option(None, "file to which a JSON line is appended")


def add_parser(names: options.Commands) -> None:
    about = "measure the throughput of LLM.generate"
    usage = "nanovllm bench throughput [MODEL] [options]"
    parser = options.add_command(names, "throughput", about, usage, __doc__)
    options.add_model_argument(parser)
    options.add_options(parser, "sizes", Sizes)
    options.add_engine_options(parser, load_format="dummy")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    sizes = Sizes(**options.fields_in(args, Sizes))
    options.append_json(sizes.json)
    with start_llm(args) as (llm, about):
        joules = None
        if sizes.energy and llm.engine.info.device == "cuda":
            from nanovllm.devices.cuda.energy import energy_counter

            joules = energy_counter(llm.engine.config.tensor_parallel_size)
        lengths = sizes.input_len, sizes.output_len
        result = measure(llm, sizes.num_prompts, *lengths, sizes.repeats, joules)
        rate = result["tokens_per_second"]
        total = rate * sum(lengths) / sizes.output_len
        print(f"{rate:,.1f} output tok/s, {total:,.1f} tok/s with the prompts", end="")
        if joules:
            print(f", {result['joules_per_token']:.4f} J per output token")
        else:
            print("; the energy of this device is not counted" if sizes.energy else "")
        options.append_json(sizes.json, about | result)
    return 0
