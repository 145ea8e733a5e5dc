"""List the supported architectures, each with example models on the Hugging Face Hub and their
short names, if any. Other models of these architectures load as well; the "architectures" field of
a model's config.json names its architecture. Most other decoders run through transformers' model
code, which is slower.

examples:
  nanovllm models
  nanovllm models --json
"""

from __future__ import annotations

import argparse
import json

from nanovllm.checkpoint.hub import ALIASES
from nanovllm.cli.options import Commands, add_command

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
    "Qwen3MoeForCausalLM": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"),
    "SmolLM3ForCausalLM": ("HuggingFaceTB/SmolLM3-3B",),
}


def add_parser(commands: Commands) -> None:
    about, usage = "list the supported models", "nanovllm models [options]"
    parser = add_command(commands, "models", about, usage, __doc__ or "")
    text = "write one JSON object per line: architecture, examples, short_names"
    parser.add_argument("--json", action="store_true", help=text)
    parser.set_defaults(run=run, parser=parser, verbose=False)


def run(args: argparse.Namespace) -> int:
    for architecture, examples in EXAMPLES.items():
        names = {alias: hub_id for alias, (hub_id, _) in ALIASES.items() if hub_id in examples}
        if args.json:
            fields = {"architecture": architecture, "examples": examples}
            print(json.dumps({**fields, "short_names": names}))
            continue
        print(architecture)
        shown = {hub_id: f", short: {alias}" for alias, hub_id in names.items()}
        for hub_id in examples:
            print(f"  {hub_id}{shown.get(hub_id, '')}")
    return 0
