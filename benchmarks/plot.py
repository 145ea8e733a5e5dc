"""Draw results beside other engines': one panel per case, one bar per engine.

    python -m benchmarks.plot benchmarks/out/results.jsonl --model qwen3-0.6b --out speed.svg

The results are what --json of the other scripts appends; the newest of each case is drawn.
Needs matplotlib (pip install matplotlib), which nothing else here does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError

# The others were measured separately, on the same kind of machine: one H200, torch 2.11.0+cu130,
# random bf16 weights in the same shapes, the same requests, best of two runs.
PEERS: dict[str, dict[str, dict[str, float]]] = {
    "qwen3-0.6b": {
        "nano": {"nano-vllm + FA3": 19391, "vLLM 0.25.1": 19878, "mini-sglang": 21258},
        "bs1": {"nano-vllm + FA3": 2.38, "vLLM 0.25.1": 2.44, "mini-sglang": 1.75},
        "bs64": {"nano-vllm + FA3": 3.36, "vLLM 0.25.1": 3.89, "mini-sglang": 2.73},
        "bs256": {"vLLM 0.25.1": 7.98, "mini-sglang": 5.94},
        "prefill": {"vLLM 0.25.1": 326559, "mini-sglang": 416054},
    },
    "qwen3-8b": {
        "nano": {"nano-vllm + FA3": 8233, "vLLM 0.25.1": 8971},
        "bs1": {"nano-vllm + FA3": 6.08, "vLLM 0.25.1": 5.24},
        "bs64": {"nano-vllm + FA3": 7.86, "vLLM 0.25.1": 7.19},
    },
}
TITLES = {
    "nano": "256 mixed requests",
    "bs1": "decode, batch 1",
    "bs64": "decode, batch 64",
    "bs256": "decode, batch 256",
    "prefill": "prefill",
}
OURS, THEIRS = "#2563eb", "#c3c9d4"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", help="a file of JSON lines")
    parser.add_argument("--model", default="qwen3-0.6b", help="default: %(default)s")
    parser.add_argument("--out", default="speed.svg", help=".svg or .png (default: %(default)s)")
    args = parser.parse_args()
    model = args.model.lower()
    draw(newest(args.results, model), model, args.out)
    print(args.out)
    return 0


def newest(path: str, model: str) -> dict[str, dict[str, Any]]:
    """The last record of each case that can be drawn, in the order of TITLES."""
    try:
        records = [json.loads(line) for line in Path(path).read_text().splitlines() if line]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read results from {path}: {error}") from error
    of_model = [record for record in records if str(record.get("model")).lower() == model]
    last = {record["case"]: record for record in of_model}
    found = {case: last[case] for case in TITLES if case in last}
    if not found:
        raise ConfigError(f"{path} has no result of {model} for any of {', '.join(TITLES)}")
    return found


def draw(records: dict[str, dict[str, Any]], model: str, out: str) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (2.9 * len(records), 2.6)
    figure, axes = plt.subplots(1, len(records), figsize=size, layout="constrained", squeeze=False)
    first = next(iter(records.values()))
    peers = {} if first["device"] == "cpu" else PEERS.get(model, {})
    for axis, (case, record) in zip(axes[0], records.items(), strict=True):
        draw_panel(axis, record, peers.get(case, {}), TITLES[case])
    title = f"{model}, {first['dtype']}, {first['device']} (dotted: the physical limit)"
    figure.suptitle(title, fontsize=10)
    figure.savefig(out, dpi=200)
    plt.close(figure)


def draw_panel(axis: Any, record: dict[str, Any], peers: dict[str, float], title: str) -> None:
    values = {"nanovllm": record["value"], **peers}
    bars = axis.bar(list(values), list(values.values()), width=0.7)
    for index, bar in enumerate(bars):
        bar.set_color(THEIRS if index else OURS)
    axis.bar_label(
        bars, [f"{v:,.0f}" if v >= 100 else f"{v:.2f}" for v in values.values()], fontsize=8
    )
    if record["floor"] is not None:
        axis.axhline(record["floor"], color="black", linewidth=0.8, linestyle=":")
    better = "more" if record["unit"] == "tok/s" else "less"
    axis.set_title(f"{title}\n{record['unit']}, {better} is better", fontsize=9)
    axis.set_yticks([])
    axis.margins(y=0.15)
    axis.tick_params(axis="x", length=0, labelsize=7, labelrotation=20)
    axis.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(exit_code(main))
