"""List the supported architectures, each with example models on the Hugging Face hub and their
short names and licenses, if any. Other models of these architectures load as well; the
"architectures" field of a model's config.json names its architecture. Most other decoder models run
with transformers' model code, which is slower.

commands:
  pull MODEL     download a model into Hugging Face's cache, and print its path
  list           list the models in the cache, with their sizes
  rm MODEL ...   remove models from the cache

examples:
  nanovllm models
  nanovllm models pull qwen3
  nanovllm models pull Qwen/Qwen3-8B-GGUF:Q4_K_M
  nanovllm models list --json
  nanovllm models rm Qwen/Qwen3-8B-GGUF:Q4_K_M
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any

from nanovllm.checkpoint.hub import ALIASES, format_size
from nanovllm.checkpoint.hub_cache import list_models, remove_model
from nanovllm.cli.options import MODEL_NAMES, Commands, add_command

# Architecture -> hub ids of example models.
EXAMPLES = {
    "Gemma2ForCausalLM": ("google/gemma-2-2b-it", "google/gemma-2-9b-it"),
    "Gemma3ForCausalLM": (
        "google/gemma-3-270m-it",
        "google/gemma-3-1b-it",
        "google/embeddinggemma-300m",
    ),
    "Glm4ForCausalLM": ("zai-org/GLM-4-9B-0414", "zai-org/GLM-4-32B-0414"),
    "GlmForCausalLM": ("zai-org/glm-4-9b-chat-hf",),
    "GraniteForCausalLM": (
        "ibm-granite/granite-3.3-2b-instruct",
        "ibm-granite/granite-3.3-8b-instruct",
    ),
    "LlamaForCausalLM": (
        "meta-llama/Llama-2-7b-chat-hf",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "MinistralForCausalLM": ("mistralai/Ministral-8B-Instruct-2410",),
    "Ministral3ForCausalLM": (
        "mistralai/Ministral-3-3B-Instruct-2512-BF16",
        "mistralai/Ministral-3-8B-Base-2512",
    ),
    "MistralForCausalLM": (
        "mistralai/Mistral-7B-Instruct-v0.1",
        "mistralai/Mistral-7B-Instruct-v0.3",
    ),
    "MixtralForCausalLM": ("mistralai/Mixtral-8x7B-Instruct-v0.1",),
    "Olmo2ForCausalLM": ("allenai/OLMo-2-0425-1B-Instruct", "allenai/OLMo-2-1124-7B-Instruct"),
    "Olmo3ForCausalLM": ("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-7B-Think"),
    "Phi3ForCausalLM": ("microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4"),
    "Qwen2ForCausalLM": ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    "Qwen3ForCausalLM": (
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-32B",
        "Qwen/Qwen3-Embedding-0.6B",
        "Qwen/Qwen3-Reranker-0.6B",
    ),
    "Qwen3NextForCausalLM": ("Qwen/Qwen3-Next-80B-A3B-Instruct",),
    "Qwen3_5ForCausalLM": ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-27B"),
    "Qwen3_5MoeForCausalLM": ("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"),
    "Qwen3MoeForCausalLM": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"),
    "SmolLM3ForCausalLM": ("HuggingFaceTB/SmolLM3-3B",),
}


def add_parser(commands: Commands) -> None:
    about = "list the supported models; pull, list and rm downloaded ones"
    usage = "nanovllm models [pull | list | rm] [options]"
    parser = add_command(commands, "models", about, usage, __doc__)
    fields = "architecture, examples, short_names, licenses"
    _add_json(parser, fields, False)
    parser.set_defaults(run=run, parser=parser, verbose=False)
    names = parser.add_subparsers(prog="nanovllm models", help=argparse.SUPPRESS)

    doc = "Download a model into Hugging Face's cache if it is not there, and print its path."
    pull = add_command(names, "pull", "", "nanovllm models pull MODEL [options]", doc)
    pull.add_argument("model", metavar="MODEL", help=MODEL_NAMES)
    text = "branch, tag or commit of a hub model (default: main)"
    pull.add_argument("--revision", metavar="TEXT", help=text)
    pull.set_defaults(run=run_pull, parser=pull)

    doc = "List the models in Hugging Face's cache, with their sizes."
    listing = add_command(names, "list", "", "nanovllm models list [options]", doc)
    _add_json(listing, "model, num_bytes, last_used (Unix time)", argparse.SUPPRESS)
    listing.set_defaults(run=run_list, parser=listing)

    doc = "Remove all revisions of models from Hugging Face's cache."
    rm = add_command(names, "rm", "", "nanovllm models rm MODEL [MODEL ...]", doc)
    text = "a model as `nanovllm models list` shows it, or a short name"
    rm.add_argument("models", metavar="MODEL", nargs="+", help=text)
    rm.set_defaults(run=run_rm, parser=rm)


def _add_json(parser: argparse.ArgumentParser, fields: str, default: Any) -> None:
    text = f"write one JSON object per line: {fields}"
    parser.add_argument("--json", action="store_true", default=default, help=text)


def _refuse_json(args: argparse.Namespace) -> None:
    if args.json:
        args.parser.error("--json is only for `nanovllm models` and `nanovllm models list`")


def run(args: argparse.Namespace) -> int:
    for architecture, examples in EXAMPLES.items():
        names = {name: each for name, each in ALIASES.items() if each.hub_id in examples}
        if args.json:
            short_names = {name: each.hub_id for name, each in names.items()}
            licenses = {name: each.license for name, each in names.items()}
            fields = {"architecture": architecture, "examples": examples}
            print(json.dumps({**fields, "short_names": short_names, "licenses": licenses}))
            continue
        print(architecture)
        shown = {each.hub_id: f", short: {name} ({each.license})" for name, each in names.items()}
        for hub_id in examples:
            print(f"  {hub_id}{shown.get(hub_id, '')}")
    return 0


def run_pull(args: argparse.Namespace) -> int:
    from nanovllm.checkpoint.find import find_checkpoint
    from nanovllm.models.registry import read_config_for

    _refuse_json(args)
    check = partial(read_config_for, model_impl="auto")  # before the weights are downloaded
    print(find_checkpoint(args.model, revision=args.revision, check=check).path)
    return 0


def run_list(args: argparse.Namespace) -> int:
    models = list_models()
    if args.json:
        for model in models:
            print(json.dumps(asdict(model)))
        return 0
    rows = [("MODEL", "SIZE", "LAST USED")]
    for each in models:
        last_used = datetime.fromtimestamp(each.last_used).strftime("%Y-%m-%d %H:%M")
        rows.append((each.model, format_size(each.num_bytes), last_used))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, size, last_used in rows:
        print(f"{name:{widths[0]}}  {size:>{widths[1]}}  {last_used}")
    return 0


def run_rm(args: argparse.Namespace) -> int:
    _refuse_json(args)
    for model in args.models:
        name, num_bytes = remove_model(model)
        print(f"removed {name}, {format_size(num_bytes)}")
    return 0
