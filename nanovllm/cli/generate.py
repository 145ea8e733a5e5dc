"""Generate a completion for each prompt. The chat template is applied if the model has one and
--raw is not given; otherwise the text is continued. All prompts run as one continuously batched
job; completions are streamed in the order of the prompts. Text goes to stdout, everything else to
stderr.

examples:
  nanovllm generate "Why is the sky blue?" "Name three primary colors."
  nanovllm generate "Summarize this:" < report.txt
  nanovllm generate Qwen/Qwen3-0.6B --system "You are a poet." "Write about the sea."
  nanovllm generate Qwen/Qwen3.5-4B --image photo.jpg "What is in this picture?"
  nanovllm generate --json-schema person.json --max-tokens 256 "Invent a person."
  nanovllm generate --lines --json --keep-going < questions.txt > answers.jsonl
  nanovllm generate --url http://127.0.0.1:8000 --lines < questions.txt
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.cli import options
from nanovllm.cli.exit_code import print_error
from nanovllm.cli.images import data_url, user_message
from nanovllm.cli.output import RunStats, in_order, print_in_order, why_empty
from nanovllm.cli.start import has_chat_template, open_model
from nanovllm.errors import ConfigError, RequestError, file_errors
from nanovllm.outputs import RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.client import HttpLLM

if TYPE_CHECKING:
    from nanovllm.llm import LLM


def add_parser(commands: options.Commands) -> None:
    about = "complete prompts as one batch"
    usage = "nanovllm generate [MODEL] [PROMPT ...] [options]"
    parser = options.add_command(commands, "generate", about, usage, __doc__ or "")
    add = parser.add_argument
    text = "text; - reads stdin. Piped text is appended to every prompt, or is the prompt if there"
    text += " is no other. The first of several prompts is taken as the model if it names one"
    add("prompts", nargs="*", metavar="PROMPT", help=text)
    add("--file", metavar="PATH", help="read one more prompt from a file (default: none)")
    text = "treat each line of the file or of stdin as a prompt (default: the whole text is one)"
    add("--lines", action="store_true", help=text)
    text = "the system prompt (default: that of the chat template)"
    add("--system", "--system-prompt", metavar="TEXT", help=text)
    text = "an image file that every prompt is about; may be repeated (default: none)"
    add("--image", metavar="PATH", action="append", default=[], help=text)
    text = "continue the text without the chat template (default: only if the model has none)"
    add("--raw", action="store_true", help=text)
    text = "if a prompt is rejected, run the others (default: run none)"
    add("--keep-going", action="store_true", help=text)
    text = "write a JSON object per line: prompt, text, token_ids, finish_reason; or prompt, error"
    add("--json", action="store_true", help=text)
    text = "a file with a JSON schema that every completion must match (default: none)"
    add("--json-schema", metavar="PATH", help=text)
    options.add_server_options(parser)
    options.add_engine_options(parser)
    options.add_sampling_options(parser, max_tokens=128, temperature=0.0)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    if args.json_schema is not None:
        params = replace(params, structured_outputs={"json": options.read_text(args.json_schema)})
    if args.raw and args.system is not None:
        raise ConfigError("--system is part of a chat, and --raw turns the chat off; leave one out")
    if args.model is None and len(args.prompts) + (args.file is not None) > 1:
        from nanovllm.checkpoint.hub import is_model_name

        if is_model_name(args.prompts[0]):
            args.model_tag = args.prompts.pop(0)
    prompts = read_prompts(args.prompts, args.file, args.lines)
    with open_model(args) as llm:
        is_chat = not args.raw and has_chat_template(llm)
        if args.system is not None and not is_chat:
            raise ConfigError("--system needs a chat template, and this model has none")
        if args.image and not is_chat:
            raise ConfigError(
                "--image needs a chat template: leave out --raw, or use another model"
            )
        inputs: list[Any] = prompts
        if is_chat:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            images = list(map(data_url, args.image))
            chats = [[*system, user_message(prompt, images)] for prompt in prompts]
            inputs = list(llm.apply_chat_template(chats))
        pieces = _stream(llm, inputs, params, args.keep_going)
        if args.json:
            has_ids = not isinstance(llm, HttpLLM)  # a server returns no token ids
            outputs = _print_json(pieces, prompts, has_ids=has_ids)
        else:
            outputs = _print_text(pieces, prompts)
    for number, output in enumerate(outputs, start=1):
        if output.error is not None:
            print_error(args.parser.prog, _numbered(number, len(prompts), output.error))
    return int(any(output.error is not None for output in outputs))


def read_prompts(arguments: list[str], file: str | None, by_lines: bool) -> list[str]:
    """Return the prompts: the arguments, then those in the file; without either, those on stdin.

    An argument "-" is replaced by stdin. Without "-" and without a file, piped text is appended to
    every argument; with `by_lines`, every argument is combined with every line.
    """
    # Arguments that are not UTF-8 contain surrogates, which no tokenizer accepts.
    prompts = [os.fsencode(argument).decode(errors="replace") for argument in arguments]
    if not all(prompt.strip() for prompt in prompts):
        raise ConfigError("no prompt: an argument is empty")
    if not prompts and file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("no prompt: pass one or more, or --file PATH, or pipe text to stdin")
        prompts = ["-"]
    if "-" in prompts:
        position = prompts.index("-")
        prompts[position : position + 1] = _split(_read(0), "stdin", by_lines)
    elif file is None and _is_piped() and (text := _read(0)).strip():
        piped = _split(text, "stdin", by_lines)
        prompts = [f"{prompt}\n\n{each}" for prompt in prompts for each in piped]
    elif file is None and by_lines:
        raise ConfigError("--lines needs --file PATH or text on stdin")
    return prompts + ([] if file is None else _split(_read(file), file, by_lines))


def _split(text: str, source: str, by_lines: bool) -> list[str]:
    """Return the whole text as one prompt, or one prompt per line that is not blank."""
    if not text.strip():
        raise ConfigError(f"no prompt: {source} is empty")
    return [line for line in text.split("\n") if line.strip()] if by_lines else [text]


def _is_piped() -> bool:
    """Whether stdin is a pipe or a file; any other inherited stdin may never end."""
    mode = 0 if sys.stdin is None else os.fstat(0).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read(file: str | int) -> str:
    """Read a file or stdin (0); normalize line endings, and strip trailing newlines."""
    with (
        file_errors("read prompts from", "stdin" if file == 0 else file),
        open(file, encoding="utf-8-sig", errors="replace", closefd=file != 0) as lines,
    ):
        return lines.read().rstrip("\n")


def _stream(
    llm: LLM | HttpLLM, inputs: list[Any], params: SamplingParams, keep_going: bool
) -> Iterator[StreamPiece]:
    """Stream all completions; a rejected prompt raises or, with `keep_going`, yields an error."""
    refused: list[StreamPiece] = []

    def on_refusal(index: int, error: RequestError) -> None:
        if not keep_going:
            hint = " (--keep-going runs the other prompts)" if len(inputs) > 1 else ""
            raise RequestError(_numbered(index + 1, len(inputs), f"{error}{hint}")) from error
        output = RequestOutput(index, None, [], "", [], "error", 0, 0.0, 0.0, error=str(error))
        refused.append(StreamPiece(index, "", [], output, index=index))

    for piece in llm.stream(inputs, params, on_refusal=on_refusal):
        while refused:
            yield refused.pop()
        yield piece
    yield from refused


def _print_text(pieces: Iterator[StreamPiece], prompts: list[str]) -> list[RequestOutput]:
    stats = RunStats()
    is_bare = len(prompts) == 1 and not sys.stdout.isatty()  # as in `text=$(nanovllm generate ...)`
    outputs = print_in_order(pieces, prompts, stats, has_headings=not is_bare)
    for number, output in enumerate(outputs, start=1):
        if output.error is None and not output.text.strip():
            print(f"prompt {number}: {why_empty(output)}", file=sys.stderr)
    print("\n" + stats.summary(), file=sys.stderr)
    return outputs


def _print_json(
    pieces: Iterator[StreamPiece], prompts: list[str], has_ids: bool
) -> list[RequestOutput]:
    outputs = []
    for piece in in_order(pieces):
        if (output := piece.output) is None:
            continue
        outputs.append(output)
        line: dict[str, Any] = {"prompt": prompts[piece.index]}
        if output.text or output.error is None:
            ids = {"token_ids": output.token_ids} if has_ids else {}
            line |= {"text": output.text, **ids, "finish_reason": output.finish_reason}
        if output.error is not None:
            line["error"] = output.error
        print(json.dumps(line), flush=True)
    return outputs


def _numbered(number: int, num_prompts: int, error: str) -> str:
    return error if num_prompts == 1 else f"prompt {number}: {error}"
