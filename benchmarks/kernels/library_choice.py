"""Search cuBLASLt for algorithms that are faster than its default, for 64 to 256 rows on a GPU.

    python -m benchmarks.kernels.library_choice [--models qwen3-0.6b ...] [--rows 64 ...]

Prints for each projection, in microseconds with cold weights, the time of torch's cuBLAS call, of
the engine's kernel, and of the fastest cuBLASLt algorithm among those that can be timed within
--seconds. Then times the projections and norms of whole layers, with the engine's products and with
the fastest ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cublaslt import Algorithm, CublasLt, Product, ProductShape
from benchmarks.kernels.linear import Shape, chosen, make_weights, shapes_of
from benchmarks.kernels.timing import GpuTimer, Run, defect, floor, line
from benchmarks.models import model_names, model_path
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least
from nanovllm.devices.cuda.ops import TritonOps
from nanovllm.errors import EngineError
from nanovllm.models.config_json import read_model_config
from nanovllm.ops.interface import NormWeights, ResidualStream

MODELS, ROWS = ["qwen3-0.6b", "qwen3-8b"], [64, 128, 192, 256]
QUICK_BYTES, QUICK_REPLAYS = 160_000_000, 2  # for the first pass over all algorithms
NUM_FINAL = 6  # number of fastest algorithms that are timed again for longer
LAYER_BYTES = 800_000_000  # total weight size of the layers that are timed together
SPLITS = range(1, 9)
CLUSTERS = 2, 3, 5, 6, 4, 8  # enum values of 1x1, 2x1, 1x2, 2x2, 4x1 and 1x4 CTAs


@dataclass(frozen=True, slots=True)
class Best:
    algorithm: Algorithm
    product: Product
    microseconds: float
    num_tried: int

    def __str__(self) -> str:
        settings = self.product.describe(self.algorithm)
        return ", ".join(f"{name} {value}" for name, value in settings.items())


class Chooser:
    """Times the library's algorithms and finds the fastest."""

    def __init__(self, timer: GpuTimer, seconds: float) -> None:
        self.library, self.timer, self.seconds = CublasLt(), timer, seconds

    def best(self, shape: ProductShape, x: Tensor, weights: list[Tensor]) -> Best:
        """Time each algorithm briefly until time is up, then the fastest ones for longer."""
        product = Product(self.library, shape)
        y = torch.zeros(shape.num_rows, shape.num_out, device="cuda", dtype=shape.out_dtype)
        few = weights[: max(2, QUICK_BYTES // weights[0].nbytes)]
        expected = functional.linear(x, weights[0])
        times: dict[bytes, tuple[float, Algorithm]] = {}
        end = time.monotonic() + self.seconds
        for algorithm in candidates(product):
            if bytes(algorithm) in times:
                continue
            if time.monotonic() > end:
                break
            calls = [partial(product, algorithm, x, weight, y) for weight in few]
            if defect(partial(self._checked, calls[0], y), expected) is None:
                took = self.timer.microseconds(calls, QUICK_REPLAYS)
                times[bytes(algorithm)] = took, algorithm
        fastest = sorted(times.values(), key=lambda each: each[0])[:NUM_FINAL]
        final = [
            (least(self.timer, [partial(product, each, x, w, y) for w in weights]), each)
            for _, each in fastest
        ]
        if not final:
            raise EngineError(f"no cuBLASLt algorithm gave the correct product of {shape}")
        took, algorithm = min(final, key=lambda each: each[0])
        return Best(algorithm, product, took, len(times))

    def _checked(self, call: Run, y: Tensor) -> Tensor:
        y.zero_()
        return call()


def candidates(product: Product) -> Iterator[Algorithm]:
    """Yield the proposals, variants with other splits, and the first in all tiles and clusters."""
    proposed = product.proposed()
    yield from proposed
    for num_splits in SPLITS:
        for algorithm in proposed:
            if (changed := product.with_splits(algorithm, num_splits)) is not None:
                yield changed
    for cluster in CLUSTERS:
        for tile in product.tiles(proposed[0]):
            if (changed := product.changed(proposed[0], tile=tile, cluster=cluster)) is not None:
                yield changed


def main() -> int:
    args = parse_args()
    timer = GpuTimer()
    chooser = Chooser(timer, args.seconds)
    print(f"cuBLASLt {chooser.library.version}")
    for model in args.models:
        config = read_model_config(json.loads(Path(model_path(model)).read_text()))
        shapes = shapes_of(config)
        for num_rows in args.rows:
            print(f"{model}, {num_rows} rows")
            found = {
                name: compare(chooser, name, shape, num_rows) for name, shape in shapes.items()
            }
            compare_layers(timer, shapes, num_rows, found)
    return 0


def compare(chooser: Chooser, name: str, shape: Shape, num_rows: int) -> dict[str, Best]:
    """Print the times of one projection; return the best algorithms, keyed by kind of output."""
    timer, weights = chooser.timer, make_weights(shape, torch.device("cuda"))
    x = torch.randn(num_rows, shape.num_in, device="cuda", dtype=torch.bfloat16)
    wanted = ProductShape(num_rows, shape.num_out, shape.num_in)
    found = {"library": chooser.best(wanted, x, weights)}
    if shape.is_summed:
        found["float32"] = chooser.best(replace(wanted, out_dtype=torch.float32), x, weights)
        found["adding"] = chooser.best(replace(wanted, adds=True), x, weights)
    plain = [partial(functional.linear, x, weight) for weight in weights]
    ours = [partial(chosen, shape, x, weight) for weight in weights]
    times = {"torch": least(timer, plain), "engine": least(timer, ours)}
    times |= {name: best.microseconds for name, best in found.items()}
    best_possible = floor(shape.num_bytes, shape.num_bytes * num_rows)
    print(line(f"  {name:>8}", times, best_possible), flush=True)
    for way, best in found.items():
        print(f"           {way}: {best}; {best.num_tried} timed", flush=True)
    return found


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


class Layers:
    """The projections and norms of layers, without attention."""

    def __init__(self, shapes: dict[str, Shape], num_rows: int) -> None:
        names = ("qkv", "o", "gate_up", "down")
        num_bytes = sum(shapes[name].num_bytes for name in names)
        self.weights = [
            LayerWeights(*(random(shapes[name].num_out, shapes[name].num_in) for name in names))
            for _ in range(max(2, LAYER_BYTES // num_bytes))
        ]
        size = shapes["o"].num_out
        self.norm = NormWeights(torch.ones(size, device="cuda"), 1e-6)
        self.attended = random(num_rows, shapes["o"].num_in)
        self.residual = random(num_rows, size)
        self.ops = TritonOps()

    def engine(self, found: dict[str, Best]) -> Tensor:
        """Run the layers as the engine does, with the products in `found` replacing its own."""
        hidden = ResidualStream(self.residual.clone())
        for weights in self.weights:
            x, residual = self.ops.norm(hidden, self.norm)
            self._project(x, weights.qkv, found.get("qkv"))
            hidden = self._add(residual, self.attended, weights.o, found.get("o"))
            x, residual = self.ops.norm(hidden, self.norm)
            if (best := found.get("gate_up")) is None:
                pack = self.ops.pack_linear
                gated = pack(weights.gate_up, None, "silu", allow_copy=False)(x)
            else:
                gated = self.ops.act_and_mul(self._project(x, weights.gate_up, best), "silu")
            hidden = self._add(residual, gated, weights.down, found.get("down"))
        return self.ops.norm(hidden, self.norm)[0]

    def _project(self, x: Tensor, weight: Tensor, best: Best | None) -> Tensor:
        if best is None:
            return self.ops.pack_linear(weight, None, None, allow_copy=False)(x)
        y = torch.empty(len(x), len(weight), device=x.device, dtype=best.product.shape.out_dtype)
        return best.product(best.algorithm, x, weight, y)

    def _add(
        self, residual: Tensor, x: Tensor, weight: Tensor, best: Best | None
    ) -> ResidualStream:
        if best is None:
            return self.ops.pack_linear(weight, None, None, allow_copy=False).add_to(residual, x)
        if best.product.shape.adds:
            return ResidualStream(best.product(best.algorithm, x, weight, residual))
        y = self._project(x, weight, best)
        return ResidualStream(residual, y if y.dtype == residual.dtype else y[None])


def compare_layers(
    timer: GpuTimer, shapes: dict[str, Shape], num_rows: int, found: dict[str, dict[str, Best]]
) -> None:
    layers = Layers(shapes, num_rows)
    plain = {name: ways["library"] for name, ways in found.items()}
    first = {name: plain[name] for name in ("qkv", "gate_up")}
    ways = {
        "engine": {},
        "qkv": {"qkv": plain["qkv"]},
        "gate_up": {"gate_up": plain["gate_up"]},
        "o": {"o": plain["o"]},
        "down": {"down": plain["down"]},
        "o adding": {"o": found["o"]["adding"]},
        "down adding": {"down": found["down"]["adding"]},
        "qkv, gate_up": first,
        "all": plain,
        "all, float32": first | {name: found[name]["float32"] for name in ("o", "down")},
        "all, adding": first | {name: found[name]["adding"] for name in ("o", "down")},
        "engine again": {},
    }
    for name, products in ways.items():
        took = least(timer, [partial(layers.engine, products)])
        print(f"    a layer, {name:>14}: {took / len(layers.weights):8.2f}", flush=True)


def least(timer: GpuTimer, calls: Sequence[Run]) -> float:
    """Return the lower of two times: a second capture may be faster by a tenth or more."""
    return min(timer.microseconds(calls) for _ in range(2))


def random(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16) * 0.02


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = f"one or more of {', '.join(model_names())} (default: {' '.join(MODELS)})"
    add("--models", nargs="+", choices=model_names(), default=MODELS, metavar="NAME", help=text)
    text = "rows of x (default: 64 128 192 256)"
    add("--rows", nargs="+", type=at_least(1), default=ROWS, metavar="N", help=text)
    text = "time limit of the first pass over a product's algorithms (default: 1)"
    add("--seconds", type=float, default=1.0, metavar="S", help=text)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
