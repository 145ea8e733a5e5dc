"""Measure the peak memory and the speed of loading quantized weights on a CPU.

    python -m benchmarks.engine.loading_quantized [--gigabytes 1]
        [--kinds gguf fp8 packed awq gptq]

Writes checkpoints of random quantized weights, sized by what they would take in bfloat16, and loads
each in a fresh process. The weights of a GGUF file stay quantized; the others are dequantized. The
peak may be 1.1 times the loaded weights plus 1 GB, a third of which the process itself takes for
torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engine.loading import (
    CONFIG,
    GB,
    HIDDEN,
    LAYER_BYTES,
    OTHER_BYTES,
    VOCAB,
    Load,
    load_in_process,
    resident_bytes,
)
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.quantized.combine import PROJECTION
from nanovllm.config import EngineConfig
from nanovllm.devices.choose import create_device
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import build_model, read_config
from nanovllm.worker.loader import LoadingLayers, load_weights
from nanovllm.worker.quantized_layouts import choose_layouts

GROUP = 128
Parts = dict[str, Tensor]
WHOLE = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}


def main() -> int:
    args = parse_args()
    is_within = True
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as name:
            load = load_one(Path(name), kind, args.gigabytes)
        limit = 1.1 * load.weight_bytes + GB
        is_within &= load.peak_bytes <= limit
        print(f"{kind}: {load}; allowed {limit / GB:.2f} GB", flush=True)
    return 0 if is_within else 1


def load_one(folder: Path, kind: str, gigabytes: float) -> Load:
    num_layers = max(round((gigabytes * GB - OTHER_BYTES) / LAYER_BYTES), 1)
    if kind != "gguf":
        write_checkpoint(folder, kind, num_layers)
        return load_in_process(folder, "bfloat16", "cpu")
    write_gguf(folder / "model.gguf", num_layers)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_stored, folder / "model.gguf").result()


def measure_stored(file: Path) -> Load:
    """Load weights that stay quantized, as an engine does; they are as large as the file."""
    checkpoint = find_checkpoint(str(file), need_tokenizer=False)
    config, model_config = EngineConfig(str(file), device="cpu"), read_config(checkpoint.config)
    device = create_device(config)
    dtype = device.choose_dtype(config.dtype, model_config.dtype, is_quantized=True)
    stored = choose_layouts(config, checkpoint, device, dtype)
    ops = device.ops(dtype)
    attention = device.attention(dtype, ops)
    build = BuildContext(device.torch_device, dtype, attention, ops, device.group, stored)
    held_bytes = resident_bytes("VmRSS")
    with torch.inference_mode():
        model = build_model(model_config, 64, build)
        start = time.perf_counter()
        load_weights(model, checkpoint, device)
        seconds = time.perf_counter() - start
    num_bytes = file.stat().st_size
    return Load(num_bytes, num_bytes, seconds, held_bytes, resident_bytes("VmHWM"))


def write_gguf(file: Path, num_layers: int) -> None:
    """Write a model in Q4_0, with embedding and head in Q8_0."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(4 * HIDDEN)
    writer.add_head_count(16)
    writer.add_layer_norm_rms_eps(1e-6)
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN))
    shapes |= dict.fromkeys(("ffn_gate", "ffn_up"), (4 * HIDDEN, HIDDEN))
    shapes["ffn_down"] = HIDDEN, 4 * HIDDEN
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", *random_blocks(VOCAB, HIDDEN, "Q8_0"))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(num_layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", *random_blocks(*shape, "Q4_0"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(rows: int, columns: int, name: str) -> tuple[np.ndarray, Any, Any]:
    kind = gguf.GGMLQuantizationType[name]
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = rows, columns // size * num_bytes
    return np.random.default_rng(0).integers(0, 64, shape, np.uint8), None, kind


def write_checkpoint(folder: Path, kind: str, num_layers: int) -> None:
    quantization, make = KINDS[kind]
    config = {**CONFIG, "num_hidden_layers": num_layers, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    build = BuildContext(torch.device("meta"), torch.bfloat16, None, None)  # type: ignore[arg-type]
    model = build_model(read_config(config), 64, build)
    expected = LoadingLayers(model, CpuDevice(EngineConfig("none"))).expected
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
    qweight = torch.randint(0, 127, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {"weight": qweight, "weight_scale_inv": torch.rand(-(-rows // 128), -(-columns // 128))}


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
    add("--gigabytes", type=float, default=1.0, help="size in bfloat16 (default: 1)")
    add(
        "--kinds",
        nargs="+",
        default=["gguf", *KINDS],
        choices=["gguf", *KINDS],
        help="formats (default: all)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
