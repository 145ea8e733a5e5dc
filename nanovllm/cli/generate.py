"""`nanovllm generate`: answer prompts from the command line, a file or a pipe, as one batch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from nanovllm.cli.live import LiveView
from nanovllm.cli.options import (
    HELP_FORMAT,
    add_engine_options,
    add_sampling_options,
    engine_config,
    sampling_params,
)
from nanovllm.cli.start import load_llm
from nanovllm.errors import ConfigError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM, Prompts

DESCRIPTION = """\
Continue each prompt, or answer it with --chat. All prompts run as one continuously batched job;
answers come in the order of the prompts. Text goes to stdout, everything else to stderr."""

EXAMPLES = """\
examples:
  nanovllm generate "The capital of France is"
  nanovllm generate --chat "Why is the sky blue?" "Name three primary colors."
  echo "Once upon a time" | nanovllm generate --temperature 0.8 --seed 1 --stop "The end"
  nanovllm generate --model Qwen/Qwen3-0.6B --max-tokens 512 "def quicksort(items):"
  nanovllm generate --chat --file questions.txt --json > answers.jsonl"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer prompts as one batch",
        usage="nanovllm generate [PROMPT ...] [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HELP_FORMAT,
        allow_abbrev=False,
    )
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="a text; without any, stdin has one per line"
    )
    parser.add_argument("--file", metavar="PATH", help="read prompts from a file, one per line")
    parser.add_argument(
        "--chat", action="store_true", help="use the model's chat template (default: plain text)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="write one JSON object per line: prompt, text, token_ids, finish_reason",
    )
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=128, temperature=0.0)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config, params = engine_config(args), sampling_params(args)
    texts = read_prompts(args.prompts, args.file)
    with load_llm(config) as llm:
        prompts = as_chat(llm, texts) if args.chat else texts
        if args.json:
            write_json(llm, texts, prompts, params)
        else:
            show_live(llm, texts, prompts, params)
    return 0


def read_prompts(prompts: list[str], file: str | None) -> list[str]:
    """Return the prompts given, plus those of the file, or else the lines that stdin holds."""
    # Arguments that are not UTF-8 arrive with surrogates, which no tokenizer takes.
    prompts = [os.fsencode(prompt).decode(errors="replace") for prompt in prompts]
    if file is not None:
        prompts = [*prompts, *_read_lines(file)]
    elif not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("no prompt: pass one or more, or --file PATH, or pipe lines to stdin")
        prompts = _read_lines(0)
    if not prompts:
        raise ConfigError(f"no prompt: {file or 'stdin'} is empty")
    return prompts


def as_chat(llm: LLM, texts: list[str]) -> list[list[int]]:
    return llm.apply_chat_template([[{"role": "user", "content": text}] for text in texts])


def show_live(llm: LLM, texts: list[str], prompts: Prompts, params: SamplingParams) -> None:
    is_bare = len(texts) == 1 and not sys.stdout.isatty()  # `answer=$(nanovllm generate ...)`
    with LiveView(texts, params.max_tokens, has_headings=not is_bare) as view:
        for piece in llm.stream(prompts, params, on_step=view.on_step):
            view.show(piece)
    print("\n" + view.summary(), file=sys.stderr)


def write_json(llm: LLM, texts: list[str], prompts: Prompts, params: SamplingParams) -> None:
    """Write a line per prompt, in their order, each as soon as those before it are written."""
    finished: dict[int, RequestOutput] = {}
    turn = 0
    for piece in llm.stream(prompts, params):
        if piece.output is not None:
            finished[piece.index] = piece.output
        while turn in finished:
            print(_json_line(texts[turn], finished.pop(turn)), flush=True)
            turn += 1


def _read_lines(file: str | int) -> list[str]:
    try:
        with open(file, encoding="utf-8", errors="replace", closefd=file != 0) as lines:
            return [line.rstrip("\r\n") for line in lines if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read prompts from {file}: {error.strerror}") from error


def _json_line(prompt: str, output: RequestOutput) -> str:
    names = ("text", "token_ids", "finish_reason")
    return json.dumps({"prompt": prompt, **{name: output[name] for name in names}})
