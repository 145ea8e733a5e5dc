"""List the supported architectures, each with example models on the Hugging Face Hub and their
short names, if any. Other models of these architectures load as well; the "architectures" field of
a model's config.json names its architecture.

examples:
  nanovllm models
  nanovllm models --json
"""

from __future__ import annotations

import argparse
import json

from nanovllm.cli.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    about, usage = "list the supported models", "nanovllm models [options]"
    parser = add_command(commands, "models", about, usage, __doc__ or "")
    text = "write one JSON object per line: architecture, examples, short_names"
    parser.add_argument("--json", action="store_true", help=text)
    parser.set_defaults(run=run, parser=parser, verbose=False)


def run(args: argparse.Namespace) -> int:
    # These modules import numpy and torch, which --help does not need.
    from nanovllm.checkpoint.hub import ALIASES
    from nanovllm.models.registry import FAMILIES

    for architecture, family in FAMILIES.items():
        names = {alias: hub_id for alias, (hub_id, _) in ALIASES.items()
                 if hub_id in family.examples}  # fmt: skip
        if args.json:
            fields = {"architecture": architecture, "examples": family.examples}
            print(json.dumps({**fields, "short_names": names}))
            continue
        print(architecture)
        shown = {hub_id: f", short: {alias}" for alias, hub_id in names.items()}
        for hub_id in family.examples:
            print(f"  {hub_id}{shown.get(hub_id, '')}")
    return 0
