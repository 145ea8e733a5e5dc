"""Draw results beside other engines': one panel per case, one bar per engine.

    python -m benchmarks.report.plot benchmarks/out/results.jsonl --model qwen3-0.6b --out speed.svg

The results are what --json of the other scripts appends; the newest of each case is drawn.
Needs matplotlib (pip install matplotlib), which nothing else here does.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.report.peers import PEERS
from benchmarks.report.records import Record, newest_by_case, read_records
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError

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


def newest(path: str, model: str) -> dict[str, Record]:
    """The last record of each case that can be drawn, in the order of TITLES."""
    last = newest_by_case(read_records(path), model)
    found = {case: last[case] for case in TITLES if case in last}
    if not found:
        raise ConfigError(f"{path} has no result of {model} for any of {', '.join(TITLES)}")
    return found


def draw(records: dict[str, Record], model: str, out: str) -> None:
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


def draw_panel(axis: Any, record: Record, peers: dict[str, float], title: str) -> None:
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
