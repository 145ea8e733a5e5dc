"""Compare speculative to plain decoding, in alternating runs of one engine.

    python -m benchmarks.engine.speculation --case copy chat wrong
    python -m benchmarks.engine.speculation --case replay --model qwen3-8b --load-format dummy

`copy` repeats a text in the prompt, `chat` asks unrelated questions. The proposer of `wrong` is
always wrong; that of `replay` knows the output, and corrupts a fifth of its draft tokens. Both
sample at a high temperature, so that the seed alone decides each token: at temperature 0, rounding
would change the output of random weights. `draft` uses the draft model of `--speculative-config` at
the same temperature, at which any two models agree: it measures what drafting costs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.replayed_drafts import Replay, set_drafter
from benchmarks.report.records import check_writable, keep, versions_text
from benchmarks.runner import open_llm
from nanovllm import LLM, SamplingParams
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import add_engine_options, at_least, dashed
from nanovllm.cli.start import configure_logging
from nanovllm.config import SpeculativeConfig
from nanovllm.features.speculation.drafter import Drafter, ModelProposer
from nanovllm.features.speculation.ngram_proposer import NgramProposer

TEXT = """\
The lighthouse of Sandvik stands on a low cape north of the harbour. It was built in 1874, after a
winter in which eleven boats were lost on the reef, and its lamp was lit by a keeper who climbed the
hundred and twelve steps twice a night. The first keeper, Anders Holm, kept a diary of the weather
and of the ships that passed; it fills nineteen volumes, and the museum in the town shows three of
them. In 1931 the lamp was connected to the power station, and in 1968 the last keeper moved to the
mainland. Since then the tower has been open to visitors from May to September. From its gallery one
sees the reef, the islands of Stora and Lilla, and on clear days the hills behind Malvik. A path of
four kilometres leads along the shore to the old fishing village, where boats are still painted in
the colours of their families: the Holms in blue and white, the Bergs in green, the Lunds in red.
In the village there is a small shop that sells bread, coffee and postcards, and next to it a bench
from which one can watch the ferry come in. It runs four times a day in summer and twice in winter,
except in storms, when the islanders have to wait, as they always have, for the wind to turn.
""".replace("\n", " ").strip()
CHANGED = TEXT[: TEXT.index(" It was built")].replace("Sandvik", "Nordvik")
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Give me three tips for sleeping well.",
    "Write a short poem about the sea.",
    "Explain what a cache is.",
    "How do bees make honey?",
)


def main() -> int:
    args = parse_args()
    configure_logging(args.verbose)
    check_writable(args.json)
    if args.speculative_config is None:
        args.speculative_config = {"method": "suffix"}
    config = SpeculativeConfig.read(args.speculative_config)
    print(json.dumps(dict(args.speculative_config)))
    with open_llm(args, has_tokenizer=not {"copy", "chat"}.isdisjoint(args.case)) as llm:
        about = {"model": args.model, "device": llm.engine.info.device}
        for case in args.case:
            for batch in args.batch:
                prompts = prompts_of(llm, case, batch)
                temperature = 0.0 if case in ("copy", "chat") else 100.0
                params = [
                    SamplingParams(temperature, max_tokens=args.new_tokens, ignore_eos=True, seed=i)
                    for i in range(batch)
                ]
                make = proposers(llm, case, prompts, params)
                speedups, accepted = compare(llm, prompts, config, make, params, args)
                value = statistics.median(speedups)
                print(
                    f"{case:<8} batch {batch:<4} {value:.2f}x plain, {accepted}   runs {speedups}"
                )
                keep(
                    args.json,
                    case=f"speculation-{case}-bs{batch}",
                    unit="times plain",
                    runs=speedups,
                    floor=None,
                    **about,
                )
    print(versions_text())
    return 0


def compare(
    llm: LLM,
    prompts: list[list[int]],
    config: SpeculativeConfig,
    make: Callable[[], Any],
    params: list[SamplingParams],
    args: argparse.Namespace,
) -> tuple[list[float], str]:
    """Return the speedup of each round, and how many draft tokens were accepted."""
    scheduler = llm.engine.core.scheduler
    drafter, before = (
        Drafter(make(), config.num_speculative_tokens),
        replace(scheduler.draft_counts),
    )
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for index in range(args.repeats + 2):
        for has_drafts in (False, True) if index % 2 else (True, False):
            set_drafter(scheduler, drafter if has_drafts else None)
            drafter.proposer = make()  # a new one, without the outputs of earlier runs
            seconds[has_drafts].append(run(llm, prompts, params))
    num_drafts = scheduler.draft_counts.num_draft_tokens - before.num_draft_tokens
    num_accepted = scheduler.draft_counts.num_accepted_tokens - before.num_accepted_tokens
    pairs = zip(seconds[False][2:], seconds[True][2:], strict=True)
    return [round(plain / own, 3) for plain, own in pairs], f"{num_accepted} of {num_drafts} drafts"


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def prompts_of(llm: LLM, case: str, batch: int) -> list[list[int]]:
    """Return token ids, different for each request of a batch."""
    if case in ("replay", "wrong", "draft"):
        vocab_size, rng = llm.engine.model_config.vocab_size, random.Random(0)
        return [[rng.randrange(min(vocab_size, 10_000)) for _ in range(128)] for _ in range(batch)]
    if case == "copy":
        encode = llm.get_tokenizer().encode
        return [
            encode(f"Text {number}: {TEXT}\n\nCopy {number}: {CHANGED}")
            for number in range(1, batch + 1)
        ]
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    templated = llm.apply_chat_template(chats)
    return [list(templated[index % len(templated)]) for index in range(batch)]


def proposers(
    llm: LLM, case: str, prompts: list[list[int]], params: list[SamplingParams]
) -> Callable[[], Any]:
    """Return a function that creates the proposer of a case."""
    vocab_size = llm.engine.model_config.vocab_size
    if case in ("copy", "chat"):
        return lambda: NgramProposer(has_store=True)
    if case == "draft":
        return ModelProposer
    set_drafter(llm.engine.core.scheduler, None)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    recorded = [prompt + each.token_ids for prompt, each in zip(prompts, outputs, strict=True)]
    return lambda: Replay(recorded, vocab_size, 1.0 if case == "wrong" else 0.2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, count = parser.add_argument, at_least(1)
    cases = ("copy", "chat", "wrong", "replay")
    choices = (*cases, "draft")
    add("--case", nargs="+", choices=choices, default=cases, help="(default: all but draft)")
    add("--batch", type=count, nargs="+", default=[1], help="requests (default: 1)")
    add("--new-tokens", type=count, default=128, help="(default: %(default)s)")
    add("--repeats", type=count, default=5, help="after two warm-ups (default: %(default)s)")
    add("--json", metavar="FILE", help="append each result as a line of JSON (default: none)")
    add_engine_options(parser, "smollm2")
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
