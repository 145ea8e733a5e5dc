"""Draw whole runs of several engines as an SVG file: one panel per case, one bar per engine.

python -m benchmarks.report.plot [--results FILE] [--out docs/speed.svg]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report.records import RESULTS, Record, read_records
from benchmarks.report.tables import README_LABELS
from nanovllm.bench.report import number
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError

OURS, THEIRS = "#2563eb", "#c3c9d4"
WIDTH, HEIGHT, BAR, GAP = 190, 110, 36, 8  # of a panel, its tallest bar, a bar, and between bars
TEXT = '<text x="{x}" y="{y}" font-size="{size}" text-anchor="middle">{text}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default=RESULTS, help=f"JSON lines (default: {RESULTS})")
    parser.add_argument("--model", default="qwen3-0.6b", help="default: %(default)s")
    parser.add_argument("--out", default="docs/speed.svg", help="default: %(default)s")
    args = parser.parse_args()
    Path(args.out).write_text(draw(read_records(args.results), args.model))
    print(args.out)
    return 0


def draw(records: list[Record], model: str) -> str:
    """The newest result of each engine in the cases that the README has."""
    own = [each for each in records if each.get("model") == model and "engine" in each]
    found = {(each["case"], each["engine"]): each for each in own if each["case"] in README_LABELS}
    cases = [case for case in README_LABELS if (case, "nanovllm") in found]
    if not cases:
        raise ConfigError(f"there is no result of {model} for any of {', '.join(README_LABELS)}")
    panels = []
    for index, case in enumerate(cases):
        bars = {engine: each for (name, engine), each in found.items() if name == case}
        panels += draw_panel(WIDTH * index, README_LABELS[case], bars)
    size = f'width="{WIDTH * len(cases)}" height="{HEIGHT + 80}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *panels, "</svg>\n"])


def draw_panel(left: int, title: str, bars: dict[str, Record]) -> list[str]:
    unit = next(iter(bars.values()))["unit"].partition(",")[0]
    better = "more" if "tok/s" in unit else "less"
    center, tallest = left + WIDTH / 2, max(each["value"] for each in bars.values())
    lines = [
        TEXT.format(x=center, y=16, size=12, text=title),
        TEXT.format(x=center, y=30, size=10, text=f"{unit}, {better} is better"),
    ]
    x = center - (len(bars) * (BAR + GAP) - GAP) / 2
    for engine, each in sorted(bars.items(), key=lambda item: item[0] != "nanovllm"):
        height = HEIGHT * each["value"] / tallest
        top, middle = 46 + HEIGHT - height, x + BAR / 2
        color = OURS if engine == "nanovllm" else THEIRS
        place = f'x="{x:.0f}" y="{top:.1f}" width="{BAR}" height="{height:.1f}"'
        lines.append(f'<rect {place} fill="{color}"/>')
        lines.append(TEXT.format(x=middle, y=f"{top - 3:.1f}", size=9, text=number(each["value"])))
        for row, word in enumerate(engine.split(" ", 1)):
            lines.append(TEXT.format(x=middle, y=58 + HEIGHT + 9 * row, size=8, text=word))
        x += BAR + GAP
    return lines


if __name__ == "__main__":
    sys.exit(exit_code(main))
