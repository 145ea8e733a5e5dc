"""`nanovllm generate`: answer prompts from the command line, a file or a pipe, as one batch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.cli.exit_code import complain
from nanovllm.cli.live import LiveView
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
from nanovllm.cli.prompt_input import InputPrompt, read_prompts
from nanovllm.cli.remote import RemoteLLM, has_chat_template, open_model
from nanovllm.cli.run_stats import why_empty
from nanovllm.errors import ConfigError, RequestError
from nanovllm.outputs import RequestOutput, StepOutput, StreamPiece
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
        questions = Questions(llm, prompts, params, args)
        if args.json:
            questions.write_json()
        else:
            questions.show_live()
    return 1 if questions.failed else 0


class Questions:
    """The prompts of one command: asked as the model wants to be, and answered or refused."""

    def __init__(
        self,
        llm: LLM | RemoteLLM,
        prompts: list[InputPrompt],
        params: SamplingParams,
        args: argparse.Namespace,
    ) -> None:
        self.failed: dict[int, str] = {}  # prompts that were refused, or whose answer broke off
        self._llm = llm
        self._prompts = prompts
        self._params = params
        self._keep_going = args.keep_going
        self._program = args.parser.prog
        self._is_chat = not args.raw and has_chat_template(llm)
        if args.system is not None and not self._is_chat:
            raise ConfigError(f"--system needs a chat template, and {model_of(args)} has none")
        self._system = args.system

    def show_live(self) -> None:
        texts = [prompt.text for prompt in self._prompts]
        is_bare = len(texts) == 1 and not sys.stdout.isatty()  # `answer=$(nanovllm generate ...)`
        empty = []
        with LiveView(texts, self._params.max_new_tokens, has_headings=not is_bare) as view:
            for piece in self._answer(on_step=view.on_step, on_skip=view.skip):
                view.show(piece)
                output = piece.output
                if output is not None and output.error is None and not output.text.strip():
                    empty.append((piece.index, output))
        for index, output in sorted(empty):
            print(f"{self._prompts[index].place}: {self._why_empty(output)}", file=sys.stderr)
        self._complain()
        print("\n" + view.summary(), file=sys.stderr)

    def write_json(self) -> None:
        """Write a line per prompt, in their order, each as soon as those before it are written."""
        finished: dict[int, RequestOutput | None] = {}
        turn = 0

        def write_turns() -> None:
            nonlocal turn
            while turn in finished:
                print(self._json_line(turn, finished.pop(turn)), flush=True)
                turn += 1

        for piece in self._answer(on_skip=lambda index: finished.update({index: None})):
            if piece.output is not None:
                finished[piece.index] = piece.output
            write_turns()
        write_turns()
        self._complain()

    def _answer(
        self,
        *,
        on_step: Callable[[StepOutput], None] | None = None,
        on_skip: Callable[[int], None],
    ) -> Iterator[StreamPiece]:
        asked, refused = self._ask()

        def refuse(index: int, error: RequestError) -> None:
            error = refused.get(index, error)
            if not self._keep_going:
                hint = " (--keep-going answers the other prompts)" if len(asked) > 1 else ""
                raise RequestError(self._at_place(index, str(error)) + hint) from error
            self.failed[index] = str(error)
            on_skip(index)

        for piece in self._llm.stream(asked, self._params, on_step=on_step, on_refusal=refuse):
            if piece.output is not None and piece.output.error is not None:
                self.failed[piece.index] = piece.output.error
            yield piece

    def _ask(self) -> tuple[list[Any], dict[int, RequestError]]:
        """Put each prompt into the chat template; None where that fails, and why."""
        if not self._is_chat:
            return [prompt.text for prompt in self._prompts], {}
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        user = [{"role": "user", "content": prompt.text} for prompt in self._prompts]
        conversations = [[*system, message] for message in user]
        try:
            return list(self._llm.apply_chat_template(conversations)), {}
        except RequestError:
            return self._ask_one_by_one(conversations)

    def _ask_one_by_one(
        self, conversations: list[list[dict[str, str]]]
    ) -> tuple[list[Any], dict[int, RequestError]]:
        asked: list[Any] = []
        refused: dict[int, RequestError] = {}
        for index, conversation in enumerate(conversations):
            try:
                asked += self._llm.apply_chat_template(conversation)
            except RequestError as error:
                asked.append(None)
                refused[index] = error
        return asked, refused

    def _at_place(self, index: int, error: str) -> str:
        return error if len(self._prompts) == 1 else f"{self._prompts[index].place}: {error}"

    def _complain(self) -> None:
        for index, error in sorted(self.failed.items()):
            complain(self._program, self._at_place(index, error))

    def _why_empty(self, output: RequestOutput) -> str:
        why = why_empty(output)
        return why if self._is_chat else f"{why}; a text that ends like a sentence can do that"

    def _json_line(self, index: int, output: RequestOutput | None) -> str:
        prompt = {"prompt": self._prompts[index].text}
        names = ["text", "token_ids", "finish_reason"]
        if isinstance(self._llm, RemoteLLM):  # who counts tokens without naming them
            names.remove("token_ids")
        answer = {} if output is None else {name: output[name] for name in names}
        error = {"error": self.failed[index]} if index in self.failed else {}
        return json.dumps({**prompt, **answer, **error})
