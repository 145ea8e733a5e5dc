"""Measure how fast weights load, and the peak memory beyond the size of their files.

    python -m benchmarks.engine.loading [--gigabytes 1] [--shards 4] [--dtype float32]
        [--device cpu] [--ranks 2]

Writes a bf16 checkpoint of random weights into a temporary folder and loads it in fresh processes:
cold, with the files evicted from the page cache where the system supports that, and warm. Memory is
the resident set of the process (VmRSS before the model is built; VmHWM, its peak, once the last
weight is loaded). Pages of a mapped file count while they are mapped, although the system may
reclaim them. With --ranks, the first of several ranks loads its shard.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.config import EngineConfig
from nanovllm.devices.choose import create_device
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import build_model, read_config
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker.loader import LoadingLayers, load_weights

GB = 1e9
HIDDEN, VOCAB = 1024, 32_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LAYER_BYTES = 2 * (4 * HIDDEN**2 + 3 * 4 * HIDDEN**2 + 2 * HIDDEN)
OTHER_BYTES = 2 * (2 * VOCAB * HIDDEN + HIDDEN)


@dataclass(frozen=True, slots=True)
class Load:
    file_bytes: int
    weight_bytes: int  # in the target dtype
    seconds: float
    held_bytes: int  # resident before loading
    peak_bytes: int

    def __str__(self) -> str:
        beyond = (self.peak_bytes - self.file_bytes) / GB
        return (
            f"{self.file_bytes / GB:.2f} GB of files into {self.weight_bytes / GB:.2f} GB in "
            f"{self.seconds:.2f} s: {self.file_bytes / GB / self.seconds:.2f} GB/s; "
            f"peak {self.peak_bytes / GB:.2f} GB, which is {beyond:.2f} more than the files "
            f"({self.held_bytes / GB:.2f} before loading)"
        )


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), args.gigabytes, args.shards)
        for kind in ("cold", "warm"):
            if kind == "cold":
                drop_from_memory(Path(name))
            load = load_in_process(Path(name), args.dtype, args.device, args.ranks)
            print(f"{kind}: {load}", flush=True)
    return 0


def write_checkpoint(folder: Path, gigabytes: float, num_shards: int) -> None:
    """Write a checkpoint of random weights, of about this size."""
    num_layers = max(round((gigabytes * GB - OTHER_BYTES) / LAYER_BYTES), 1)
    write_random_weights(folder, CONFIG | {"num_hidden_layers": num_layers}, num_shards)


def write_random_weights(folder: Path, config: dict[str, Any], num_shards: int) -> None:
    """Write a checkpoint in the config's shapes and dtype."""
    (folder / "config.json").write_text(json.dumps(config))
    model_config = read_config(config)
    dtype = getattr(torch, model_config.dtype)
    build = BuildContext(torch.device("meta"), dtype, None, None)  # type: ignore[arg-type]
    model = build_model(model_config, 64, build)
    expected = LoadingLayers(model, CpuDevice(EngineConfig("none"))).expected
    names = sorted(expected)
    for i in range(num_shards):
        own = names[i * len(names) // num_shards : (i + 1) * len(names) // num_shards]
        tensors = {n: torch.empty(expected[n].shape, dtype=dtype).normal_(std=0.02) for n in own}
        save_file(tensors, folder / f"model-{i + 1:05}-of-{num_shards:05}.safetensors")


def drop_from_memory(folder: Path) -> None:
    """Evict the files from the page cache, where the system supports that."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_in_process(folder: Path, dtype: str, device: str, num_ranks: int = 1) -> Load:
    """Load in a fresh process, whose peak memory does not include earlier work."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, folder, dtype, device, num_ranks).result()


def measure(folder: Path, dtype: str, device: str, num_ranks: int) -> Load:
    checkpoint = find_checkpoint(str(folder), need_tokenizer=False)
    place = create_device(EngineConfig(str(folder), device=device))
    first = TPGroup(0, num_ranks)
    build = BuildContext(
        place.torch_device, getattr(torch, dtype), SdpaAttention(16), TorchOps(), first
    )
    held_bytes = resident_bytes("VmRSS")
    with torch.inference_mode(), place.in_order():
        model = build_model(read_config(checkpoint.config), 64, build)
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        start = time.perf_counter()
        load_weights(model, checkpoint, place)
        seconds = time.perf_counter() - start
    file_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
    return Load(file_bytes, weight_bytes, seconds, held_bytes, resident_bytes("VmHWM"))


def resident_bytes(name: str) -> int:
    """Read a value of /proc/self/status; the peak of getrusage is inherited from the parent."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gigabytes", type=float, default=1.0, help="size of the files (default: 1)")
    add("--shards", type=int, default=4, help="number of files (default: 4)")
    add("--dtype", default="bfloat16", help="target dtype (default: bfloat16, as stored)")
    add("--device", default="cpu", help="cpu, cuda or auto (default: cpu)")
    add("--ranks", type=int, default=1, help="ranks that shard the weights (default: 1)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
