"""`nanovllm models`: what can be loaded, by architecture."""

from __future__ import annotations

import argparse
import json

from nanovllm.cli.options import Commands, add_command

DESCRIPTION = """\
List the supported architectures, each with some models of its kind on the Hugging Face hub, and the
short names of those that have one. A model of the same architecture that is not named here loads as
well: config.json says which it is, under "architectures"."""

EXAMPLES = """\
examples:
  nanovllm models
  nanovllm models --json"""


def add_parser(commands: Commands) -> None:
    usage = "nanovllm models [options]"
    parser = add_command(
        commands, "models", "list what can be loaded", usage, DESCRIPTION, EXAMPLES
    )
    text = "write one JSON object per line: architecture, examples, short_names"
    parser.add_argument("--json", action="store_true", help=text)
    parser.set_defaults(run=run, parser=parser, verbose=False)


def run(args: argparse.Namespace) -> int:
    # These bring numpy and torch, which --help does without.
    from nanovllm.checkpoint.find import ALIASES
    from nanovllm.models.registry import FAMILIES

    short_names = {hub_id: alias for alias, (hub_id, _) in ALIASES.items()}
    for architecture, family in FAMILIES.items():
        own = {short_names[hub_id]: hub_id for hub_id in family.examples if hub_id in short_names}
        if args.json:
            record = {"architecture": architecture, "examples": family.examples, "short_names": own}
            print(json.dumps(record))
            continue
        print(architecture)
        for hub_id in family.examples:
            short = f", short: {short_names[hub_id]}" if hub_id in short_names else ""
            print(f"  {hub_id}{short}")
    return 0
