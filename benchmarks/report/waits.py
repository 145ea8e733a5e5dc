"""Plot the latencies of the last result of `nanovllm bench serve --json FILE`.

    python -m benchmarks.report.waits FILE result.svg

There is one panel per kind of latency, each a cumulative distribution.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovllm.cli.exit_code import exit_code

PANEL, WIDTH, HEIGHT, LEFT, TOP = 320, 250, 150, 40, 34  # pixels
LINE, GRID = "#2563eb", "#d5dae3"


def main() -> int:
    args = parse_args()
    result = json.loads(Path(args.result).read_text().splitlines()[-1])
    Path(args.out).write_text(draw(waits(result["requests"])))
    return 0


def waits(requests: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return latencies in milliseconds, by kind, of the requests without an error."""
    good = [each for each in requests if each["error"] is None]
    seconds = {
        "first token": [each["first_token"] for each in good],
        "inter-token": [gap for each in good for gap in each["gaps"]],
        "end to end": [each["seconds"] for each in good],
    }
    return {name: [1000 * each for each in values] for name, values in seconds.items()}


def draw(waits: Mapping[str, Sequence[float]]) -> str:
    """Draw one panel per name."""
    panels = [
        line
        for index, (title, values) in enumerate(waits.items())
        for line in _panel(PANEL * index + LEFT, title, sorted(values))
    ]
    size = f'width="{PANEL * len(waits)}" height="{TOP + HEIGHT + 42}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *panels, "</svg>\n"])


def _panel(left: int, title: str, values: list[float]) -> list[str]:
    most = max([*values, 1e-3])
    bottom = TOP + HEIGHT
    lines = [_text(left + WIDTH / 2, TOP - 14, title), _text(left + WIDTH / 2, bottom + 34, "ms")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = left + WIDTH * share, bottom - HEIGHT * share
        lines += [_line(left, y, left + WIDTH, y), _line(x, TOP, x, bottom)]
        lines += [
            _text(left - 20, y + 4, f"{share:.0%}"),
            _text(x, bottom + 16, f"{most * share:.4g}"),
        ]
    points = [
        f"{left + WIDTH * value / most:.1f},{bottom - HEIGHT * (index + 1) / len(values):.1f}"
        for index, value in enumerate(values)
    ]
    return [*lines, f'<polyline points="{" ".join(points)}" fill="none" stroke="{LINE}"/>']


def _line(x: float, y: float, x_end: float, y_end: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{x_end:.1f} {y_end:.1f}" stroke="{GRID}"/>'


def _text(x: float, y: float, content: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{content}</text>'


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", metavar="FILE", help="written by --json")
    parser.add_argument("out", metavar="SVG", help="output file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
