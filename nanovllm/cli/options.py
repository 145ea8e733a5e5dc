"""The options that commands share: how they are spelled, explained and read back."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeAlias

from nanovllm.cli.foreign_flags import add_foreign_flags, check_foreign_flags
from nanovllm.config import WHOLE_CONTEXT, EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.sampling_params import SamplingParams

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Record = type[EngineConfig] | type[SamplingParams]

# Examples keep their lines, and the longest option still has its explanation beside it.
HELP_FORMAT = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=31)

_MODEL_HELP = {
    "device": "where to run: 'auto' picks the best there is, 'cpu' is always there",
    "dtype": "float32, bfloat16, float16, or 'auto': what suits the model and the device",
    "max_model_len": "longest prompt plus answer, in tokens: 32768, 32K (32768) or 32k (32000)",
    "load_format": "'dummy' makes random weights from the config alone, to measure speed",
}
_ENGINE_HELP = {
    "max_num_seqs": "most requests running at once; the others wait",
    "max_num_batched_tokens": "most tokens in one step; longer prompts are prefilled in chunks",
    "kvcache_block_size": "tokens per block of the KV cache, a multiple of 16",
    "num_kvcache_blocks": "blocks in the KV cache; -1 takes what memory allows",
    "kv_cache_dtype": "'fp8' keeps keys and values in eight bits, nearly twice as many; 'auto': as "
    "the model computes them",
    "gpu_memory_utilization": "share of a GPU's memory to use",
    "attention_backend": "triton, flash_attn, sdpa (a slow reference), or 'auto': what is fastest",
    "tensor_parallel_size": "devices to split the model over",
    "step_timeout": "seconds until a step that does not return ends the engine; 0 for debuggers",
}
# vLLM's flags come first where the field has another name.
_FLAGS = {
    "kvcache_block_size": ("--block-size", "--kvcache-block-size"),
    "num_kvcache_blocks": ("--num-gpu-blocks-override", "--num-kvcache-blocks"),
    "tensor_parallel_size": ("-tp", "--tensor-parallel-size"),
}
_SAMPLING_HELP = {
    "max_tokens": "most tokens to generate per answer",
    "temperature": "0 always takes the likeliest token; higher is more varied",
    "top_p": "sample from the likeliest tokens that make up this probability",
    "top_k": "sample from this many of the likeliest tokens; 0 for all",
    "min_p": "leave out tokens less likely than this share of the likeliest one",
}


def dashed(argv: Sequence[str]) -> list[str]:
    """Spell options with dashes: --max_tokens=8 becomes --max-tokens=8; values stay as they are."""
    arguments = list(argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for position, argument in enumerate(arguments[:end]):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            arguments[position] = name.replace("_", "-") + equals + value
    return arguments


def at_least(limit: int) -> Callable[[str], int]:
    """An argparse type: integers from `limit` on."""

    def integer(text: str) -> int:
        if int(text) < limit:
            raise argparse.ArgumentTypeError(f"must be at least {limit}, got {text}")
        return int(text)

    return integer


def seconds(may_be_0: bool) -> Callable[[str], float]:
    """An argparse type: a time, and not for ever."""

    def number(text: str) -> float:
        value = float(text)
        if not 0 <= value < math.inf or not (value or may_be_0):
            least = "0 or more" if may_be_0 else "more than 0"
            raise argparse.ArgumentTypeError(f"must be {least} seconds, got {text}")
        return value

    return number


def length(text: str) -> int:
    """Parse a length as vLLM does: 1k is 1000 and 1K is 1024 tokens.

    argparse shows the name of this function in its error message.
    """
    factors = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
    if text == "auto":
        return WHOLE_CONTEXT
    if text[-1:] not in factors:
        return int(text)
    number = float(text[:-1])
    if math.isinf(number):
        raise ValueError
    return round(number * factors[text[-1]])


_TYPES: dict[str, Callable[[str], Any]] = {
    "max_model_len": length,
    "max_num_batched_tokens": length,
}


def add_command(
    commands: Commands, name: str, about: str, usage: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """Add the parser of a command."""
    return commands.add_parser(
        name,
        help=about,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=HELP_FORMAT,
        allow_abbrev=False,
    )


def add_quantization(add: Callable[..., object]) -> None:
    add(
        "-q",
        "--quantization",
        type=lambda text: None if text.lower() == "none" else text,
        metavar="NAME",
        help="'fp8' rounds plain weights as they are loaded; of a quantised checkpoint, how it is "
        "stored: awq, gptq, compressed-tensors or fp8 (default: as the checkpoint is)",
    )


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")


def add_engine_options(
    parser: argparse.ArgumentParser,
    default_model: str | None = "smollm2",
    **own_defaults: int | str,
) -> None:
    """Add the options of EngineConfig, with the names that they have in vLLM.

    A command whose default model depends on the device passes None and sets it later.
    """
    defaults = {**_defaults(EngineConfig), **own_defaults}
    parser.set_defaults(model_tag=None, default_model=default_model)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="log what the engine does, and a server's requests (default: at a terminal)",
    )
    add_model = parser.add_argument_group("model").add_argument
    shown = default_model or "qwen3-0.6b, on a CPU smollm2"
    add_model(
        "--model",
        help="a folder, a .gguf file, a Hugging Face id (org/name or org/name/file.gguf), or the "
        f"short name smollm2 or qwen3 (default: {shown})",
    )
    add_model(
        "--revision",
        metavar="NAME",
        help="a branch, tag or commit of a model on the hub (default: its main branch)",
    )
    add_quantization(add_model)
    for name, text in _MODEL_HELP.items():
        _add_option(add_model, name, text, defaults[name])
    add = parser.add_argument_group("engine").add_argument
    for name, text in _ENGINE_HELP.items():
        _add_option(add, name, text, defaults[name])
    add(
        "--target-inter-token-ms",
        type=float,
        metavar="X",
        help="prefill in chunks, so that the tokens of streams beside them come no more than this "
        "apart (default: 25 in serve; other commands put throughput first)",
    )
    add(
        "--threads",
        type=at_least(1),
        metavar="N",
        help="CPU threads to compute with (default: torch's choice, one per core)",
    )
    add(
        "--enable-prefix-caching",
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute what prompts share once (default: on)",
    )
    add(
        "--enforce-eager",
        action="store_true",
        help="run without recorded steps or graphs, for debugging (default: with)",
    )
    add_foreign_flags(parser)


def add_server_options(parser: argparse.ArgumentParser, url: str | None = None) -> None:
    """Which server to ask, and how to get in; without a default for it the engine runs here."""
    add = parser.add_argument_group("server").add_argument
    text = "%(default)s" if url else "none: the model runs here"
    add("--url", "--base-url", default=url, help=f"a server with OpenAI's API (default: {text})")
    add("--api-key", metavar="KEY", help="that the server asks for (default: none)")


def add_sampling_options(
    parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float
) -> None:
    defaults = _defaults(SamplingParams)
    defaults.update(max_tokens=max_tokens, temperature=temperature)
    group = parser.add_argument_group("sampling")
    for name, text in _SAMPLING_HELP.items():
        _add_option(group.add_argument, name, text, defaults[name])
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="repeat the same choices for the same prompt, whatever else runs (default: every "
        "prompt has its own)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end an answer before this text; may be given more than once (default: none)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on to --max-tokens even when the model says it is done (default: stop there)",
    )


def model_of(args: argparse.Namespace) -> str:
    """Return the model that MODEL or --model names, or else the command's default."""
    if args.model_tag is not None and args.model is not None:
        raise ConfigError(f"give the model once, not as {args.model_tag} and {args.model}")
    return str(args.model_tag or args.model or args.default_model)


def engine_config(args: argparse.Namespace, **others: Any) -> EngineConfig:
    """Check the engine options before anything slow is started."""
    check_foreign_flags(args)
    options = fields_in(args, EngineConfig) | {"model": model_of(args)}
    options.pop("seed", None)  # that of sampling, unless a command says otherwise
    return EngineConfig(**options | others)


def check_no_engine_options(args: argparse.Namespace) -> None:
    """With a URL the engine is another's: refuse options that would change this one."""
    check_foreign_flags(args)
    names = (*_MODEL_HELP, *_ENGINE_HELP, "revision", "threads", "target_inter_token_ms")
    for name in (*names, "quantization", "enable_prefix_caching", "enforce_eager"):
        if getattr(args, name) != args.parser.get_default(name):
            flag = "--" + name.replace("enable", "no").replace("_", "-")
            raise ConfigError(
                f"{flag} is for an engine here, and --url asks another; leave one out"
            )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(**fields_in(args, SamplingParams))


def fields_in(args: argparse.Namespace, record: Record) -> dict[str, Any]:
    """Return the options that are fields of a record."""
    names = [field.name for field in fields(record) if hasattr(args, field.name)]
    return {name: getattr(args, name) for name in names}


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def append_text(path: str | None, text: str) -> None:
    """Append to a file, if one was asked for."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _defaults(record: Record) -> dict[str, Any]:
    return {field.name: field.default for field in fields(record) if field.default is not MISSING}


def _add_option(
    add: Callable[..., object], name: str, text: str, default: str | int | float
) -> None:
    metavars: dict[type, str] = {str: "NAME", int: "N", float: "X"}
    shown = "the model's own" if default == WHOLE_CONTEXT else "%(default)s"
    add(
        *_FLAGS.get(name, ["--" + name.replace("_", "-")]),
        dest=name,
        type=_TYPES.get(name, type(default)),
        default=default,
        metavar=metavars[type(default)],
        help=f"{text} (default: {shown})",
    )
