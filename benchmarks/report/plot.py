"""Draw whole runs of several engines as an SVG file: one panel per case, one bar per engine.

python -m benchmarks.report.plot [--results FILE] [--out docs/speed.svg]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report.records import RESULTS, Record, number, read_records
from benchmarks.report.tables import README_LABELS
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError

OURS, THEIRS = "#2563eb", "#c3c9d4"
WIDTH, HEIGHT, BAR, GAP = 190, 110, 36, 8  # pixels: panel width, tallest bar, bar width, gap


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
    """Draw the latest result of each engine for the cases in the README."""
    own = [each for each in records if each.get("model") == model and "engine" in each]
    found = {(each["case"], each["engine"]): each for each in own if each["case"] in README_LABELS}
    cases = [case for case in README_LABELS if (case, "nanovllm") in found]
    if not cases:
        raise ConfigError(f"there are no results of {model} for any of {', '.join(README_LABELS)}")
    panels = []
    for index, case in enumerate(cases):
        bars = {engine: each for (name, engine), each in found.items() if name == case}
        panels += draw_panel(WIDTH * index, README_LABELS[case], bars)
    size = f'width="{WIDTH * len(cases)}" height="{HEIGHT + 80}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *panels, "</svg>\n"])


def draw_panel(left: int, title: str, bars: dict[str, Record]) -> list[str]:
    unit = next(iter(bars.values()))["unit"].partition(",")[0]
    center, tallest = left + WIDTH / 2, max(each["value"] for each in bars.values())
    better = "more" if "tok/s" in unit else "less"
    lines = [text(center, 16, 12, title), text(center, 30, 10, f"{unit}, {better} is better")]
    x = center - (len(bars) * (BAR + GAP) - GAP) / 2
    for engine, each in bars.items():
        height, middle = HEIGHT * each["value"] / tallest, x + BAR / 2
        top, color = 46 + HEIGHT - height, OURS if engine == "nanovllm" else THEIRS
        place = f'x="{x:.0f}" y="{top:.1f}" width="{BAR}" height="{height:.1f}"'
        lines.append(f'<rect {place} fill="{color}"/>')
        lines.append(text(middle, top - 3, 9, number(each["value"])))
        for row, word in enumerate(engine.split(" ", 1)):
            lines.append(text(middle, 58 + HEIGHT + 9 * row, 8, word))
        x += BAR + GAP
    return lines


def text(x: float, y: float, size: int, content: str) -> str:
    place = f'x="{x:.0f}" y="{y:.1f}" font-size="{size}" text-anchor="middle"'
    return f"<text {place}>{content}</text>"


if __name__ == "__main__":
    sys.exit(exit_code(main))
