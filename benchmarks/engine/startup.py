"""Measure the time from process start to first token, with weights on a local disk.

    python -m benchmarks.engine.startup [--model qwen3-0.6b] [--target-inter-token-ms 25]

Writes a checkpoint of random weights into a temporary folder and starts twice: cold, without
compiled kernels, Python bytecode or weights in the page cache, and warm, with all of them. With
--target-inter-token-ms, all graphs are captured before the engine is ready, as in a server. The
printed targets ("bar") are for GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import model_path
from benchmarks.report.records import check_writable, keep, markdown, versions_text
from benchmarks.runner import open_llm
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import add_engine_options, dashed
from nanovllm.cli.start import configure_logging

BARS = {"cold": 25.0, "warm": 5.0}
SERVER_BARS = {"cold": 30.0, "warm": 12.0}
PHASES = ("imports", "weights", "kernels", "largest step", "graphs", "the rest", "first token")
PROMPT_LEN = 128

Spans = dict[str, float]  # seconds by phase


@dataclass(frozen=True, slots=True)
class Start:
    device: str
    dtype: str
    spans: Spans


def main() -> int:
    args = parse_args()
    configure_logging(args.verbose)
    if args.measure:
        print(json.dumps(asdict(measure(args))))
        return 0
    check_writable(args.json)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(args.model, folder / "model")
        bars = BARS if args.target_inter_token_ms is None else SERVER_BARS
        for kind, bar in bars.items():
            start = start_process(folder, is_cold=kind == "cold")
            total = sum(start.spans.values())
            cells = {"seconds": kind}
            cells |= {phase: f"{start.spans.get(phase, 0.0):.1f}" for phase in PHASES}
            rows.append({**cells, "process start to first token": f"{total:.1f} (bar: {bar:.0f})"})
            about = {"model": args.model, "cells": rows[-1], **asdict(start)}
            keep(args.json, case=f"start-{kind}", unit="s", runs=[total], floor=None, **about)
    print(f"{args.model}, random weights, {start.dtype}, {start.device}, {versions_text()}")
    print(f"\n{markdown(rows)}")
    return 0


def write_checkpoint(model: str, folder: Path) -> None:
    from benchmarks.engine.loading import write_random_weights  # imports torch

    found = find_checkpoint(model_path(model), need_weights=False, need_tokenizer=False)
    folder.mkdir()
    write_random_weights(folder, dict(found.config), num_shards=1)


def start_process(folder: Path, is_cold: bool) -> Start:
    """Run `measure` in a fresh process that keeps its compile caches in `folder`."""
    from benchmarks.engine.loading import drop_from_memory

    if is_cold:
        drop_from_memory(folder / "model")
    caches = {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "NUMBA_CACHE_DIR": str(folder / "numba"),
        "PYTHONPYCACHEPREFIX": str(folder / "python"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    own = ["--measure", str(folder / "model"), "--began", repr(time.time())]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine.startup", *sys.argv[1:], *own],
        env={**os.environ, **caches},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(result.returncode)
    return Start(**json.loads(result.stdout.splitlines()[-1]))


def measure(args: argparse.Namespace) -> Start:
    from nanovllm import SamplingParams
    from nanovllm.llm import LLM  # noqa: F401  # times the imports of an engine

    spans = {"imports": time.time() - args.began}
    time_phases(spans)
    args.model = args.measure
    with open_llm(args) as llm:
        spans["the rest"] = time.time() - args.began - sum(spans.values())
        llm.generate([[1] * PROMPT_LEN], SamplingParams(max_tokens=1), use_tqdm=False)
        spans["first token"] = time.time() - args.began - sum(spans.values())
        return Start(llm.engine.info.device, llm.engine.info.dtype, spans)


def time_phases(spans: Spans) -> None:
    """Record how long the engine takes for each phase of its start."""
    from nanovllm.devices.cuda.memory import has_cuda
    from nanovllm.worker import load_model

    wrap(load_model, "load_weights", "weights", spans)
    if has_cuda():
        from nanovllm.devices.cuda.device import CudaDevice  # needs triton
        from nanovllm.devices.cuda.steps import CudaSteps

        wrap(CudaDevice, "profile", "largest step", spans)
        wrap(CudaDevice, "compile_ahead", "kernels", spans)
        wrap(CudaSteps, "capture_first", "graphs", spans)
        wrap(CudaSteps, "capture_all", "graphs", spans)


def wrap(owner: Any, name: str, phase: str, spans: Spans) -> None:
    run: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any, **options: Any) -> Any:
        start = time.time()
        result = run(*args, **options)
        spans[phase] = time.time() - start
        return result

    setattr(owner, name, timed)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_engine_options(parser, "qwen3-0.6b")
    text = "append each start as a line of JSON (default: none)"
    parser.add_argument("--json", metavar="FILE", help=text)
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
