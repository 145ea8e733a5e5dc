"""`nanovllm serve`: an HTTP server with the APIs of OpenAI and Anthropic, and vLLM's flags."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli import options as shared
from nanovllm.cli.options import (
    Commands,
    add_command,
    add_engine_options,
    add_model_argument,
    at_least,
    read_text,
    seconds,
)
from nanovllm.cli.start import set_child_threads
from nanovllm.config import SERVING_TARGET_MS, WHOLE_CONTEXT, EngineConfig
from nanovllm.errors import ConfigError, RequestError
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.server.options import ServerOptions

DESCRIPTION = """\
Answer requests over HTTP, many at once: OpenAI's API (chat completions, completions, responses,
embeddings) and Anthropic's messages. Flags have the names that they have in vLLM."""

EXAMPLES = """\
examples:
  nanovllm serve
  nanovllm serve Qwen/Qwen3-0.6B --port 8000 --api-key secret
  nanovllm serve Qwen/Qwen3-32B -tp 2 --max-model-len 32k --served-model-name qwen
  nanovllm serve Qwen/Qwen3-8B --data-parallel-size 4
  nanovllm serve --config server.yaml"""


def add_parser(commands: Commands) -> None:
    usage = "nanovllm serve [MODEL] [options]"
    parser = add_command(
        commands, "serve", "answer requests over HTTP", usage, DESCRIPTION, EXAMPLES
    )
    add = parser.add_argument
    add_model_argument(parser)
    add("--config", metavar="FILE", help="a YAML file with options; those given here come first")
    add_model_options(parser)
    _add_api_options(parser)
    _add_operating_options(parser)
    model = os.environ.get("NANOVLLM_MODEL") or "smollm2"
    parser.set_defaults(run=run, parser=parser, target_inter_token_ms=SERVING_TARGET_MS)
    parser.set_defaults(default_model=model)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    set_child_threads(args.threads, config)
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.server.options import sampling_in
    from nanovllm.server.run import check_certificate, is_loopback, listen, make_server

    check_certificate(args.ssl_keyfile, args.ssl_certfile)
    options = server_options(args, config.model, {})
    with listen(args.host, args.port) as listener:
        options = replace(options, is_local=is_loopback(listener) and not options.api_keys)
        how = {"restart_core": args.restart_engine, "in_process": args.in_process}
        llm = AsyncLLM(**asdict(config), **how)
        try:
            if args.generation_config == "auto":  # which only the model tells
                defaults = sampling_in(llm.generation_config) | args.override_generation_config
                options = replace(options, sampling_defaults=defaults)
            server = make_server(llm, options, args.ssl_keyfile, args.ssl_certfile)
            scheme = "https" if args.ssl_certfile else "http"
            host, port = listener.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            url = f"{scheme}://{host}:{port}"
            print(f"{options.model_names[0]} is at {url} (API: /v1)", file=sys.stderr)
            server.run(sockets=[listener])
        finally:
            llm.close()
    return 0


def with_config_file(arguments: list[str]) -> list[str]:
    """Put the options of a --config file before those of the command line, which then win."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--config" and (equals or len(arguments) > position + 1):
            path = value if equals else arguments[position + 1]
            first = next(i for i, each in enumerate(arguments) if each.startswith("-"))
            options = _options_in_file(path)
            if first == (2 if arguments[0] == "serve" else 3):
                options.pop("model", None)  # MODEL is given
            return [*arguments[:first], *as_arguments(options), *arguments[first:]]
    return arguments


def is_off(flag: str, args: argparse.Namespace) -> bool:
    """Whether --no-NAME asks for what is so, as `enforce-eager: false` in a file does."""
    name, given = flag.removeprefix("--no-"), vars(args)
    values = (given.get(name.replace("-", "_")), given.get(f"--{name}"))
    return name != flag and any(value is False for value in values)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return shared.engine_config(args, seed=args.seed)


def server_options(
    args: argparse.Namespace, model: str, generation_config: Mapping[str, Any]
) -> ServerOptions:
    from nanovllm.server.options import ServerOptions

    return ServerOptions(
        model_names=tuple(args.served_model_name or [model]),
        api_keys=tuple(args.api_key),
        allowed_origins=tuple(origin for given in args.allowed_origins for origin in given),
        limit_concurrency=args.limit_concurrency,
        max_body_bytes=args.max_body_bytes,
        max_queued_requests=args.max_queued_requests,
        request_timeout=args.request_timeout,
        shutdown_timeout=args.shutdown_timeout,
        chat_template=read_chat_template(args.chat_template),
        tool_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        sampling_defaults=read_sampling_defaults(args.generation_config, generation_config)
        | args.override_generation_config,
        metrics_prefix=args.metrics_prefix,
        root_path=f"/{args.root_path.strip('/')}" if args.root_path.strip("/") else "",
    )


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Write options, by their names in a file, as a command line has them; null is none."""
    arguments = []
    for name, value in options.items():
        if value is None:
            continue
        flag = f"--{str(name).replace('_', '-')}"
        if value is False:
            flag = flag.replace("--", "--no-", 1)
        arguments.append(flag)
        if not isinstance(value, bool):
            values = value if isinstance(value, list) else [value]
            arguments += [
                json.dumps(each) if isinstance(each, dict) else str(each) for each in values
            ]
    return arguments


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add what `serve` and `batch` have beside the options of every command."""
    add_engine_options(parser, max_model_len=WHOLE_CONTEXT)
    add = parser.add_argument_group("engines").add_argument
    add("--distributed-executor-backend", choices=("mp", "uni", "ray"), default="mp",
        help="who starts the processes of these devices: mp, this machine; ray, a Ray cluster, "
        "on several (default: %(default)s)")  # fmt: skip
    add("-dp", "--data-parallel-size", type=at_least(1), default=1, metavar="N",
        help="engines that share the requests, each with the whole model on devices of its own "
        "(default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of requests that have none of their own")
    add = parser.add_argument_group("requests").add_argument
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what requests call the model; the first is shown in answers (default: MODEL)",
    )
    add(
        "--chat-template", metavar="FILE", help="a Jinja file, or its text, in place of the model's"
    )
    add(
        "--generation-config",
        default="auto",
        metavar="WHERE",
        help="defaults for sampling: 'auto' for the model's own, 'vllm' for none, or a folder with "
        "a generation_config.json (default: %(default)s)",
    )
    add(
        "--override-generation-config",
        type=_sampling_override,
        default={},
        metavar="JSON",
        help="defaults for sampling that replace those of --generation-config, as in "
        "'{\"temperature\": 0.5}' (default: none)",
    )
    add("--tool-call-parser", metavar="NAME", help="how tool calls are written (default: by the "
        "chat template)")  # fmt: skip
    add("--reasoning-parser", metavar="NAME", help="how reasoning is written (default: likewise)")


def _add_api_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("network").add_argument
    host, port, key = (os.environ.get(f"NANOVLLM_{name}") for name in ("HOST", "PORT", "API_KEY"))
    add("--host", default=host or "127.0.0.1",
        help="0.0.0.0 for all of the machine (default: $NANOVLLM_HOST or 127.0.0.1)")  # fmt: skip
    add("--port", type=int, default=port or 8000, metavar="N",
        help="0 for any (default: $NANOVLLM_PORT or 8000)")  # fmt: skip
    add("--api-key", nargs="+", type=_key, default=[key] if key else [], metavar="KEY",
        help="what clients must show, but for /health, /ping and the page's files "
        "(default: $NANOVLLM_API_KEY or nothing)")  # fmt: skip
    add("--allowed-origins", nargs="+", type=origins, default=[], metavar="ORIGIN",
        help="sites whose pages may call this server, as in https://example.com; * for all "
        "(default: none)")  # fmt: skip
    add("--root-path", default="", metavar="PATH", help="where a proxy shows this server")
    add("--ssl-keyfile", metavar="FILE", help="with --ssl-certfile: serve HTTPS")
    add("--ssl-certfile", metavar="FILE")


def _add_operating_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("operation").add_argument
    add("--max-body-bytes", type=at_least(1), default=32 * 2**20, metavar="N",
        help="of a request (default: %(default)s)")  # fmt: skip
    add("--max-queued-requests", type=at_least(1), default=2048, metavar="N",
        help="that wait; more are refused with status 429 (default: %(default)s)")  # fmt: skip
    add("--limit-concurrency", type=at_least(1), metavar="N",
        help="HTTP requests at once; more get status 503 (default: any number)")  # fmt: skip
    add("--request-timeout", type=seconds(may_be_0=False), metavar="SECONDS",
        help="for a whole answer (default: any time)")  # fmt: skip
    add("--shutdown-timeout", type=seconds(may_be_0=True), default=10.0, metavar="SECONDS",
        help="for answers under way when SIGTERM comes (default: %(default)s)")  # fmt: skip
    add("--log-level", choices=("debug", "info", "warning", "error"),
        help="info has requests and throughput (default: info at a terminal or with --verbose, "
        "else warning)")  # fmt: skip
    add("--restart-engine", action="store_true",
        help="start the engine anew when its process dies or hangs")  # fmt: skip
    add("--in-process", action="store_true",
        help="run the engine in the server's own process, where breakpoint() works; nothing "
        "watches it (default: in a process of its own)")  # fmt: skip
    add("--metrics-prefix", default="vllm:", metavar="TEXT",
        help="of the names of metrics (default: %(default)s)")  # fmt: skip


def _key(text: str) -> str:
    """Whoever sends no key would have the empty one."""
    if not text:
        raise argparse.ArgumentTypeError("a key must not be empty")
    return text


def origins(text: str) -> list[str]:
    """Parse one origin, or a JSON list as in vLLM. argparse shows this name in its errors."""
    if not text.startswith("["):
        return [text]
    found = json.loads(text)
    if not all(isinstance(each, str) for each in found):
        raise ValueError
    return list(found)


def _sampling_override(text: str) -> dict[str, Any]:
    from nanovllm.server.options import SAMPLING_NAMES

    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("it must be a JSON object")
        if unknown := given.keys() - set(SAMPLING_NAMES):
            raise ValueError(f"{min(unknown)!r} is not one of {', '.join(SAMPLING_NAMES)}")
        SamplingParams(**given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return given


def read_chat_template(option: str | None) -> str | None:
    """A file; or the template itself, which no file name looks like."""
    if option is None:
        return None
    from nanovllm.chat_template import Program

    text = option if "{" in option else read_text(option)
    try:
        Program(text)
    except RequestError as error:
        raise ConfigError(f"--chat-template: {error}") from error
    return text


def read_sampling_defaults(where: str, of_model: Mapping[str, Any]) -> dict[str, Any]:
    from nanovllm.server.options import sampling_in

    if where == "vllm":
        return {}
    config = of_model
    if where != "auto":
        path = str(Path(where, "generation_config.json"))
        text = read_text(path)
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path} must hold a JSON object, not a {type(config).__name__}")
    return sampling_in(config)


def _options_in_file(path: str) -> dict[str, Any]:
    import yaml

    try:
        options = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{path} must map options to values")
    if "config" in options:
        raise ConfigError(f"{path} names a config of its own; give the options in one file")
    return options
