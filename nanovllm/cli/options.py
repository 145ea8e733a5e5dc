"""Command-line options that several commands share; most are generated from dataclass fields."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, fields
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from nanovllm.config import WHOLE_CONTEXT, EngineConfig
from nanovllm.engine.engine_options import FLAGS, VLLM_OPTIONS, ignored_notes
from nanovllm.errors import ConfigError, file_errors
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.server_options import read_text as read_text
from nanovllm.validation import choices_of

Commands: TypeAlias = "argparse._SubParsersAction[ArgumentParser]"
Names: TypeAlias = Iterable[str] | None

# Preserve the line breaks of examples, and put the help next to options of up to 27 characters.
HELP_FORMAT = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=31)
MODEL_NAMES = (
    "a folder, a .gguf file, a hub id (org/name, org/name:Q4_K_M, org/name/file.gguf) or a short "
    "name, which `nanovllm models` lists"
)
METAVARS = {int: "N", float: "X", str: "TEXT"}
NO_FLAGS = ("skip_tokenizer_init", "depth")
SEVERAL_REQUESTS = ("seed", "data_parallel_size")  # options of serve and batch only
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")


def add_options(
    parser: ArgumentParser, title: str, record: type, names: Names = None, **defaults: Any
) -> None:
    """Add flags for the fields of `record` that have a help text, or for those in `names` only.

    `defaults` replace the defaults of the fields.
    """
    add, hints = parser.add_argument_group(title).add_argument, get_type_hints(record)
    for field in fields(record):
        if "help" in field.metadata and (names is None or field.name in names):
            default = defaults.get(field.name, field.default)
            _add_option(add, field, hints[field.name], default)


def default_text(field: Field[Any], default: Any) -> str:
    """Return the default as --help and docs/reference.md show it."""
    unset = field.metadata.get("unset", "none")
    texts = {"None": unset, "()": unset, "": unset, "True": "on", "False": "off"}
    texts[str(WHOLE_CONTEXT)] = "the model's own"
    text, env = texts.get(str(default), str(default)), field.metadata.get("env")
    return text if env is None else f"${env} or {text}"


def _add_option(add: Callable[..., Any], field: Field[Any], hint: Any, default: Any) -> None:
    options: dict[str, Any] = {}
    if hint is bool:
        options["action"] = BooleanOptionalAction
    elif choices := choices_of(hint):
        options["choices"] = choices
    else:
        if type(None) in get_args(hint):
            hint = get_args(hint)[0]
        if get_origin(hint) is tuple:
            options["nargs"], hint = "+", get_args(hint)[0]
        options["type"] = field.metadata.get("parse", hint)
        options["metavar"] = METAVARS.get(hint, "JSON")
    text = f"{field.metadata['help']} (default: {default_text(field, default)})"
    flags = filter(None, [_flag(field.name), field.metadata.get("alias")])
    action = add(*flags, dest=field.name, help=text, **options)
    env_value = os.environ.get(field.metadata.get("env", ""))
    if default == ():  # an empty API key is kept, and rejected: it must not open the server
        action.default = default if env_value is None else (env_value,)
    else:
        action.default = env_value or default


def dashed(argv: Sequence[str]) -> list[str]:
    """Spell option names with dashes: --max_tokens=a_b becomes --max-tokens=a_b."""
    arguments = list(argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for position, argument in enumerate(arguments[:end]):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            arguments[position] = name.replace("_", "-") + equals + value
    return arguments


def at_least(limit: int) -> Callable[[str], int]:
    """Return an argparse type that accepts integers of at least `limit`."""

    def integer(text: str) -> int:
        if int(text) < limit:
            raise argparse.ArgumentTypeError(f"must be at least {limit}, got {text}")
        return int(text)

    return integer


def positive(text: str) -> float:
    """Parse a finite number above 0, as an argparse type."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def add_command(
    commands: Commands, name: str, about: str, usage: str, doc: str | None
) -> ArgumentParser:
    """Add the parser of a command; its help is the docstring `doc`, with the examples last."""
    description, mark, examples = (doc or "").partition("examples:")
    texts: Any = {"help": about, "usage": usage, "epilog": mark + examples}
    texts |= {"description": description, "formatter_class": HELP_FORMAT}
    return commands.add_parser(name, allow_abbrev=False, **texts)


def add_model_argument(parser: ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")


def add_engine_options(
    parser: ArgumentParser, default_model: str = "smollm2", **defaults: Any
) -> None:
    """Add the options that all commands with an engine share."""
    parser.set_defaults(model_tag=None, default_model=default_model)
    add = parser.add_argument
    text = "log engine activity and server requests (default: on at a terminal)"
    add("-v", "--verbose", action=BooleanOptionalAction, help=text)
    add("--model", help=f"{MODEL_NAMES} (default: {default_model})")
    text = "CPU threads for computation (default: torch's choice, one per core)"
    add("--threads", type=at_least(1), metavar="N", help=text)
    names = {field.name for field in fields(EngineConfig)}.difference(NO_FLAGS, SEVERAL_REQUESTS)
    add_options(parser, "engine", EngineConfig, names, **defaults)
    for name in VLLM_OPTIONS:
        options: dict[str, Any] = {"dest": _flag(name), "help": argparse.SUPPRESS}
        if name in FLAGS:
            options["action"] = BooleanOptionalAction
        elif name == "lora_modules":
            options["nargs"] = "+"
        short = ["-pp"] if name == "pipeline_parallel_size" else []
        add(_flag(name), *short, **options)


def add_server_options(parser: ArgumentParser, url: str | None = None) -> None:
    """Add --url and --api-key; without a default `url`, the model runs in this process."""
    add = parser.add_argument_group("server").add_argument
    text = "%(default)s" if url else "none: the model runs in this process"
    add("--url", "--base-url", default=url, help=f"an OpenAI-compatible server (default: {text})")
    add("--api-key", metavar="KEY", help="the API key that the server requires (default: none)")


def add_sampling_options(parser: ArgumentParser, **defaults: Any) -> None:
    add_options(parser, "sampling", SamplingParams, SAMPLING, **defaults)
    text = "end the output before this text; may be given more than once (default: none)"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)


def append_json(path: str | None, *results: dict[str, Any]) -> None:
    """Append JSON lines to a file, if given; without results, check that it is writable."""
    if path is not None:
        with file_errors("write", path), open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in results)


def model_of(args: Namespace) -> str:
    """Return the model given as MODEL or --model, or else the command's default."""
    if args.model_tag is not None and args.model is not None:
        raise ConfigError(f"give the model once, not as {args.model_tag} and {args.model}")
    return str(args.model_tag or args.model or args.default_model)


def engine_config(args: Namespace) -> EngineConfig:
    """Return the engine options, validated before anything slow starts."""
    _check_foreign_flags(args)
    options = fields_in(args, EngineConfig) | {"model": model_of(args)}
    if "temperature" in args:  # the command's --seed is a sampling parameter
        options.pop("seed")
    return EngineConfig(**options)


def check_no_engine_options(args: Namespace) -> None:
    """Raise ConfigError for engine options: with --url, the engine runs on a server."""
    _check_foreign_flags(args)
    names = fields_in(args, EngineConfig).keys() - {"model", "seed"}
    for name in sorted([*names, "threads"]):
        if getattr(args, name) != args.parser.get_default(name):
            flag = _flag(name)
            raise ConfigError(f"{flag} has no effect on the server at --url; leave one of them out")


def sampling_params(args: Namespace) -> SamplingParams:
    return SamplingParams(**fields_in(args, SamplingParams))


def fields_in(args: Namespace, record: type) -> dict[str, Any]:
    """Return the parsed options that are fields of a dataclass."""
    values = {each.name: getattr(args, each.name) for each in fields(record) if each.name in args}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _check_foreign_flags(args: argparse.Namespace) -> None:
    """Print a line for each vLLM flag that has no effect here; reject unsupported ones."""
    for note in ignored_notes({name: getattr(args, _flag(name)) for name in VLLM_OPTIONS}, _flag):
        print(note, file=sys.stderr)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
