"""The options that every benchmark takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from nanovllm.bench.floors import Rates
from nanovllm.bench.models import model_names
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig("")
    add = parser.add_argument_group("engine").add_argument
    add(
        "--model",
        default="qwen3-0.6b",
        metavar="NAME",
        help=f"{', '.join(model_names())}: their shapes come with the package; or a folder, a file "
        "or a hub id, of which only the config is read. Weights are random (default: %(default)s)",
    )
    add("--device", default=default.device, help="cpu, cuda or auto (default: %(default)s)")
    add("--dtype", default=default.dtype, help="float32, bfloat16, ... (default: %(default)s)")
    add(
        "--max-model-len",
        type=int,
        default=default.max_model_len,
        metavar="N",
        help="longest prompt plus answer, in tokens (default: %(default)s)",
    )
    add("--enforce-eager", action="store_true", help="no graph capture (default: captured)")
    add("-v", "--verbose", action="store_true", help="tell what happens (default: warnings)")


def add_target_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--target-inter-token-ms",
        type=float,
        metavar="X",
        help="read prompts in pieces, so that the tokens of the answers beside them come no more "
        "than this apart (default: read them at once)",
    )


def add_result_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    add(
        "--repeats",
        type=at_least(1),
        default=3,
        metavar="N",
        help="timed passes after a warm-up; their median counts (default: %(default)s)",
    )
    add("--json", metavar="FILE", help="append each result as a line of JSON (default: none)")


def add_floor_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("floor (of an H200; elsewhere there is one if both are given)")
    tera = Rates().bytes_per_second / 1e12, Rates().flops_per_second / 1e12
    texts = "TB/s that memory sustains", "TFLOP/s that products sustain"
    for name, text, default in zip(("--bandwidth", "--tflops"), texts, tera, strict=True):
        help_text = f"{text} (default: on an H200, {default:g})"
        add.add_argument(name, type=float, metavar="X", help=help_text)


def rates(args: argparse.Namespace, device_name: str) -> Rates | None:
    """The rates given, or an H200's on an H200; those of other devices are not known."""
    given = [args.bandwidth, args.tflops]
    if "H200" not in device_name and None in given:
        if given == [None, None]:
            return None
        raise ConfigError(
            f"the rates of this device ({device_name}) are not known: give both --bandwidth "
            "and --tflops, or neither"
        )
    default = Rates()
    return Rates(
        default.bytes_per_second if args.bandwidth is None else args.bandwidth * 1e12,
        default.flops_per_second if args.tflops is None else args.tflops * 1e12,
    )


def at_least(limit: int) -> Callable[[str], int]:
    """An argparse type: integers from `limit` on."""

    def integer(text: str) -> int:
        if int(text) < limit:
            raise argparse.ArgumentTypeError(f"must be at least {limit}, got {text}")
        return int(text)

    return integer
