"""How much memory quantised weights take while they are widened, and how fast that is.

    python -m benchmarks.engine.loading_quantised [--gigabytes 1] [--kinds fp8 packed awq gptq]

Writes checkpoints of random codes, so large that their weights in bfloat16 take about so many
bytes, and loads each in a fresh process. The peak may be a tenth more than the widened weights,
plus 1 GB; the process itself, with torch, has about a third of that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engine.loading import CONFIG, GB, LAYER_BYTES, OTHER_BYTES, load_in_process
from nanovllm.checkpoint.quantised.round_to_fp8 import PROJECTION
from nanovllm.layers.build import Build
from nanovllm.models.registry import build_model, read_config
from nanovllm.platforms import create_platform
from nanovllm.worker.loader import UnpackedLayers

GROUP = 128
Parts = dict[str, Tensor]
WHOLE = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}


def main() -> int:
    args = parse_args()
    is_within = True
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as name:
            write_checkpoint(Path(name), kind, args.gigabytes)
            load = load_in_process(Path(name), "bfloat16", "cpu")
        limit = 1.1 * load.weight_bytes + GB
        is_within &= load.peak_bytes <= limit
        print(f"{kind}: {load}; allowed {limit / GB:.2f} GB", flush=True)
    return 0 if is_within else 1


def write_checkpoint(folder: Path, kind: str, gigabytes: float) -> None:
    num_layers = max(round((gigabytes * GB - OTHER_BYTES) / LAYER_BYTES), 1)
    quantisation, make = KINDS[kind]
    config = {**CONFIG, "num_hidden_layers": num_layers, "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config))
    build = Build(torch.device("meta"), torch.bfloat16, None, None)  # type: ignore[arg-type]
    model = build_model(read_config(config), 64, build)
    expected = UnpackedLayers(model, create_platform("cpu")).expected
    tensors: Parts = {}
    for name, tensor in expected.items():
        module = name.removesuffix(".weight")
        if len(tensor.shape) == 2 and PROJECTION.fullmatch(name):
            parts = make(*tensor.shape)
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def make_fp8(rows: int, columns: int) -> Parts:
    codes = torch.randint(0, 127, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.rand(-(-rows // 128), -(-columns // 128))}


def make_packed(rows: int, columns: int) -> Parts:
    return {
        "weight_packed": words(rows, columns // 8),
        "weight_scale": torch.rand(rows, columns // GROUP).bfloat16(),
        "weight_zero_point": words(rows // 8, columns // GROUP),
        "weight_shape": torch.tensor([rows, columns]),
    }


def make_awq(rows: int, columns: int) -> Parts:
    return {
        "qweight": words(columns, rows // 8),
        "qzeros": words(columns // GROUP, rows // 8),
        "scales": torch.rand(columns // GROUP, rows).half(),
    }


def make_gptq(rows: int, columns: int) -> Parts:
    return {
        "qweight": words(columns // 8, rows),
        "qzeros": words(columns // GROUP, rows // 8),
        "scales": torch.rand(columns // GROUP, rows).half(),
        "g_idx": (torch.randperm(columns) // GROUP).int(),
    }


BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BY_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
BY_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
BY_PACKING = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WHOLE}},
}
KINDS: dict[str, tuple[dict[str, Any], Callable[[int, int], Parts]]] = {
    "fp8": (BY_BLOCK, make_fp8),
    "packed": (BY_PACKING, make_packed),
    "awq": (BY_AWQ, make_awq),
    "gptq": (BY_GPTQ, make_gptq),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gigabytes", type=float, default=1.0, help="of widened weights (default: 1)")
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of weights (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
