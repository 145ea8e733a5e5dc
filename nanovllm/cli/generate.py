"""`nanovllm generate`: answer prompts from the command line, a file or a pipe, as one batch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.cli.exit_code import print_error
from nanovllm.cli.options import (
    Commands,
    add_command,
    add_engine_options,
    add_sampling_options,
    add_server_options,
    model_of,
    read_text,
    sampling_params,
)
from nanovllm.cli.output import RunStats, in_order, print_in_order, why_empty
from nanovllm.cli.prompt_input import InputPrompt, read_prompts
from nanovllm.cli.remote import RemoteLLM, has_chat_template, open_model
from nanovllm.errors import ConfigError, RequestError
from nanovllm.outputs import RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

DESCRIPTION = """\
Answer each prompt; a model without a chat template continues it, as does --raw. All prompts run as
one continuously batched job; answers come in the order of the prompts, as they are written. Text
goes to stdout, everything else to stderr."""

EXAMPLES = """\
examples:
  nanovllm generate "Why is the sky blue?" "Name three primary colors."
  nanovllm generate --raw "The capital of France is"
  nanovllm generate "Summarise this:" < report.txt
  nanovllm generate --system "You are a poet." --temperature 0.8 --seed 1 "Write about the sea."
  nanovllm generate Qwen/Qwen3-0.6B "Why is the sky blue?" --max-tokens 512
  nanovllm generate --json-schema person.json --max-tokens 256 "Invent a person."
  nanovllm generate --lines --json --keep-going < questions.txt > answers.jsonl
  nanovllm generate --url http://127.0.0.1:8000 --lines < questions.txt"""


def add_parser(commands: Commands) -> None:
    usage = "nanovllm generate [MODEL] [PROMPT ...] [options]"
    parser = add_command(
        commands, "generate", "answer prompts as one batch", usage, DESCRIPTION, EXAMPLES
    )
    add = parser.add_argument
    add(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="a text; - is what stdin holds. Text that is piped in is appended to every prompt, or "
        "is the prompt if there is no other. The first of several is the model if it names one",
    )
    add("--file", metavar="PATH", help="one more prompt, from a file (default: none)")
    text = "take each line of the file or of stdin on its own (default: the whole text is one)"
    add("--lines", action="store_true", help=text)
    text = "instructions the model is given with every prompt (default: its own)"
    add("--system", "--system-prompt", metavar="TEXT", help=text)
    text = "continue the text, without the chat template (default: where the model has none)"
    add("--raw", action="store_true", help=text)
    text = "answer the others when a prompt cannot be (default: none is answered)"
    add("--keep-going", action="store_true", help=text)
    text = (
        "write one JSON object per line: prompt, text, token_ids, finish_reason; or prompt, error"
    )
    add("--json", action="store_true", help=text)
    text = "a file with a JSON schema that every answer fits (default: none)"
    add("--json-schema", metavar="PATH", help=text)
    add_server_options(parser)
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=128, temperature=0.0)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    if args.json_schema is not None:
        params = replace(params, structured_outputs={"json": read_text(args.json_schema)})
    if args.raw and args.system is not None:
        raise ConfigError("--system is part of a chat, which --raw does without; leave one out")
    if args.model is None and len(args.prompts) + (args.file is not None) > 1:
        from nanovllm.checkpoint.find import is_model_name  # brings numpy

        if is_model_name(args.prompts[0]):
            args.model_tag = args.prompts.pop(0)
    prompts = read_prompts(args.prompts, args.file, args.lines)
    with open_model(args) as llm:
        outputs = _generate(llm, prompts, params, args)
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.error is not None:
            print_error(args.parser.prog, _at_place(prompt, prompts, output.error))
    return int(any(output.error is not None for output in outputs))


def _generate(
    llm: LLM | RemoteLLM,
    prompts: list[InputPrompt],
    params: SamplingParams,
    args: argparse.Namespace,
) -> list[RequestOutput]:
    """Print the answers; returns the outputs in the order of the prompts."""
    texts = [prompt.text for prompt in prompts]
    is_chat = not args.raw and has_chat_template(llm)
    if args.system is not None and not is_chat:
        raise ConfigError(f"--system needs a chat template, and {model_of(args)} has none")
    inputs: list[Any] = texts
    if is_chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        chats = [[*system, {"role": "user", "content": text}] for text in texts]
        inputs = list(llm.apply_chat_template(chats))
    stats = RunStats()
    pieces = _stream(llm, inputs, params, None if args.keep_going else prompts)
    if args.json:
        outputs = []
        for piece in in_order(pieces):
            if piece.output is not None:
                print(_json_line(texts[piece.index], piece.output, llm), flush=True)
                outputs.append(piece.output)
        return outputs
    is_bare = len(texts) == 1 and not sys.stdout.isatty()  # `answer=$(nanovllm generate ...)`
    outputs = print_in_order(pieces, texts, stats, has_headings=not is_bare)
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.error is None and not output.text.strip():
            hint = "" if is_chat else "; a text that ends like a sentence can do that"
            print(f"{prompt.place}: {why_empty(output)}{hint}", file=sys.stderr)
    print("\n" + stats.summary(), file=sys.stderr)
    return outputs


def _stream(
    llm: LLM | RemoteLLM,
    inputs: list[Any],
    params: SamplingParams,
    strict_prompts: list[InputPrompt] | None,
) -> Iterator[StreamPiece]:
    """Stream all answers.

    A refused prompt raises an error that names its place; without `strict_prompts` it has one
    piece, with the error in its output.
    """
    refused: list[StreamPiece] = []

    def on_refusal(index: int, error: RequestError) -> None:
        if strict_prompts is not None:
            hint = " (--keep-going answers the other prompts)" if len(inputs) > 1 else ""
            place = _at_place(strict_prompts[index], strict_prompts, str(error))
            raise RequestError(place + hint) from error
        output = RequestOutput(index, None, [], "", [], "error", 0, 0.0, 0.0, error=str(error))
        refused.append(StreamPiece(index, "", [], output, index=index))

    for piece in llm.stream(inputs, params, on_refusal=on_refusal):
        while refused:
            yield refused.pop()
        yield piece
    yield from refused


def _json_line(prompt: str, output: RequestOutput, llm: LLM | RemoteLLM) -> str:
    line: dict[str, Any] = {"prompt": prompt}
    if output.text or output.error is None:
        line["text"] = output.text
        if not isinstance(llm, RemoteLLM):  # servers count tokens without naming them
            line["token_ids"] = output.token_ids
        line["finish_reason"] = output.finish_reason
    if output.error is not None:
        line["error"] = output.error
    return json.dumps(line)


def _at_place(prompt: InputPrompt, prompts: list[InputPrompt], error: str) -> str:
    return error if len(prompts) == 1 else f"{prompt.place}: {error}"
