"""Seconds from the start of a process to its first token, with weights read from a local disk.

    python -m benchmarks.startup [--model qwen3-0.6b]

Writes a checkpoint of random weights into a temporary folder and starts twice: cold, with no
kernel and no Python file compiled and no weight in the page cache, and warm, with all of them. The
bars are for a GPU.
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

from nanovllm.bench.models import model_path
from nanovllm.bench.options import add_engine_options
from nanovllm.bench.report import append, installed
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import dashed
from nanovllm.cli.start import configure_logging

BARS = {"cold": 25.0, "warm": 5.0}
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
    if args.json:
        append(args.json, "")
    starts: dict[str, Start] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(args.model, folder / "model")
        for kind in BARS:
            if kind == "cold":
                drop_from_memory(folder / "model")
            starts[kind] = start_process(folder)
            if args.json:
                append(args.json, start_line(args.model, kind, starts[kind]))
    start = starts["warm"]
    print(f"{args.model}, random weights, {start.dtype}, {start.device}, {versions()}")
    print(f"\n{table({kind: start.spans for kind, start in starts.items()})}")
    return 0


def write_checkpoint(model: str, folder: Path) -> None:
    """Write random weights, named and shaped as the config's architecture has them."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    found = find_checkpoint(model_path(model), need_weights=False, need_tokenizer=False)
    config = dict(found.config)
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in shapes.named_parameters():
        tensor = torch.ones(parameter.shape, dtype=dtype)
        is_matrix = tensor.dim() > 1
        tensors[name] = tensor.normal_(0, 0.02, generator=generator) if is_matrix else tensor
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def drop_from_memory(folder: Path) -> None:
    """Have the files read from the disk again, where the system takes such advice."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start_process(folder: Path) -> Start:
    """Run `measure` in a fresh process whose compiled kernels lie beside the checkpoint."""
    caches = {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "NUMBA_CACHE_DIR": str(folder / "numba"),
        "PYTHONPYCACHEPREFIX": str(folder / "python"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    own = ["--measure", str(folder / "model"), "--began", repr(time.time())]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup", *sys.argv[1:], *own],
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
    from nanovllm.llm import LLM

    spans = {"imports": time.time() - args.began}
    time_phases(spans)
    with LLM(
        args.measure,
        skip_tokenizer_init=True,
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        enforce_eager=args.enforce_eager,
    ) as llm:
        spans["the rest"] = time.time() - args.began - sum(spans.values())
        llm.generate([[1] * PROMPT_LEN], SamplingParams(max_tokens=1), use_tqdm=False)
        spans["first token"] = time.time() - args.began - sum(spans.values())
        return Start(llm.engine.info.device, llm.engine.info.dtype, spans)


def time_phases(spans: Spans) -> None:
    """Note how long the engine takes for each part of its start."""
    from nanovllm.platforms.cuda import CudaPlatform, has_cuda
    from nanovllm.worker import worker

    wrap(worker, "load_weights", "weights", spans)
    wrap(CudaPlatform, "profile", "largest step", spans)
    if has_cuda():
        from nanovllm.worker.cuda.backend import CudaBackend  # needs triton
        from nanovllm.worker.cuda.decode_graphs import GraphedSteps

        wrap(CudaBackend, "compile_ahead", "kernels", spans)
        wrap(GraphedSteps, "capture_first", "graphs", spans)


def wrap(owner: Any, name: str, phase: str, spans: Spans) -> None:
    run: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any, **options: Any) -> Any:
        start = time.time()
        result = run(*args, **options)
        spans[phase] = time.time() - start
        return result

    setattr(owner, name, timed)


def table(starts: dict[str, Spans]) -> str:
    names = list(starts)
    lines = [f"| seconds | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for phase in PHASES:
        cells = (f"{starts[name].get(phase, 0.0):.1f}" for name in names)
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    totals = (f"{sum(starts[name].values()):.1f} (bar: {BARS[name]:.0f})" for name in names)
    return "\n".join([*lines, f"| process start to first token | {' | '.join(totals)} |"])


def start_line(model: str, kind: str, start: Start) -> str:
    """A line of JSON like the other benchmarks'."""
    seconds = sum(start.spans.values())
    record = {
        "case": f"start-{kind}",
        "unit": "s",
        "runs": [seconds],
        "floor": None,
        "value": seconds,
        "model": model,
        **asdict(start),
        "versions": installed(),
    }
    return json.dumps(record) + "\n"


def versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in installed().items())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_engine_options(parser)
    text = "append each start as a line of JSON (default: none)"
    parser.add_argument("--json", metavar="FILE", help=text)
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
