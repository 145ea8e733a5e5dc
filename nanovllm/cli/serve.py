"""Serve a model over HTTP to many concurrent clients.

The server implements OpenAI's API (chat completions, completions, responses, embeddings) and
Anthropic's messages. Options that also exist in vLLM have the same names.

examples:
  nanovllm serve
  nanovllm serve --demo --allow-pause
  nanovllm serve Qwen/Qwen3-0.6B --port 8000 --api-key secret
  nanovllm serve Qwen/Qwen3-32B -tp 2 --max-model-len 32k --served-model-name qwen
  nanovllm serve --config server.yaml
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from nanovllm.cli import options as shared
from nanovllm.cli.options import Commands, add_command, add_options, engine_config, fields_in
from nanovllm.cli.start import set_child_threads
from nanovllm.config import WHOLE_CONTEXT, EngineConfig, serving_target
from nanovllm.errors import ConfigError
from nanovllm.serve.server_options import ServerOptions, read_text, resolve

# Server options that `nanovllm batch` accepts too.
REQUEST_OPTIONS = (
    *("served_model_name", "chat_template", "generation_config", "override_generation_config"),
    *("tool_call_parser", "reasoning_parser"),
)
# Defaults with --demo: small enough to show prefill chunks, and every block as a cell of the page.
DEMO = {"kvcache_block_size": 32, "num_kvcache_blocks": 192, "max_num_batched_tokens": 256}


def add_parser(commands: Commands) -> None:
    about, usage = "serve a model over HTTP", "nanovllm serve [MODEL] [options]"
    parser = add_command(commands, "serve", about, usage, __doc__)
    shared.add_model_argument(parser)
    add_model_options(parser, target_inter_token_ms=serving_target())
    names = {field.name for field in fields(ServerOptions)}.difference(REQUEST_OPTIONS)
    add_options(parser, "server", ServerOptions, names)
    model = os.environ.get("NANOVLLM_MODEL") or "smollm2"
    parser.set_defaults(run=run, parser=parser, default_model=model)


def add_model_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options that `serve` and `batch` share."""
    text = "a YAML file with options; the command line overrides it (default: none)"
    parser.add_argument("--config", metavar="FILE", help=text)
    shared.add_engine_options(parser, max_model_len=WHOLE_CONTEXT, **defaults)
    add_options(parser, "engines", EngineConfig, shared.SEVERAL_REQUESTS)
    add_options(parser, "requests", ServerOptions, REQUEST_OPTIONS)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    set_child_threads(args.threads, config)
    options = server_options(args, config.model, {})  # validate options before the model is loaded
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.serve.http_server import check_certificate, is_loopback, listen, make_server

    check_certificate(args.ssl_keyfile, args.ssl_certfile)
    with listen(args.host, args.port) as listener:
        is_local = is_loopback(listener) and not options.api_key
        if args.allow_pause:
            config = replace(config, depth=0)  # each step is committed before the next is planned
        how = {"restart_core": args.restart_engine, "in_process": args.in_process}
        llm = AsyncLLM(**asdict(config), **how)
        try:
            options = server_options(args, config.model, llm.generation_config)
            options = replace(options, is_local=is_local)
            server = make_server(llm, options)
            scheme = "https" if args.ssl_certfile else "http"
            host, port = listener.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            url = f"{scheme}://{host}:{port}"
            print(f"{options.served_model_name[0]} is at {url} (API: /v1)", file=sys.stderr)
            server.run(sockets=[listener])
        finally:
            llm.close()
    return 0


def server_options(
    args: argparse.Namespace, model: str, generation_config: Mapping[str, Any]
) -> ServerOptions:
    return resolve(ServerOptions(**fields_in(args, ServerOptions)), model, generation_config)


def read_config(path: str) -> dict[str, Any]:
    import yaml

    try:
        options = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(options, dict) or "config" in options:
        raise ConfigError(f"{path} must map options to values, and must not set config")
    return options


def set_options(parser: argparse.ArgumentParser, options: Mapping[str, Any]) -> None:
    """Set the options of a config file as the defaults of a command; null leaves one unset."""
    for name, value in options.items():
        if value is None:
            continue
        action = parser._option_string_actions.get(f"--{str(name).replace('_', '-')}")
        is_switch = action is not None and action.nargs == 0
        if action is None or isinstance(value, bool) != is_switch:
            parser.error(f"the config file has an invalid option {name}: {value}")
        if isinstance(value, dict):
            value = json.dumps(value)
        elif action.nargs == "+":
            value = [str(each) for each in (value if isinstance(value, list) else [value])]
        elif not is_switch:
            value = str(value)  # parsed like a value of the command line
        parser.set_defaults(**{"default_model" if name == "model" else action.dest: value})
