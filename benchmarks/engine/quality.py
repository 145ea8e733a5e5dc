"""Measure what quantizing weights and the KV cache costs: perplexity of a fixed text on a CPU.

    python -m benchmarks.engine.quality [--model smollm2] [--dtypes bfloat16 float32]
        [--text FILE] [--cases "fp8 weights" ...]

The model is a GGUF file; "dequantized" is the same model in float32, from which the FP8 checkpoints
are made. They quantize the same projections as `quantization="fp8"`, or "all". The text is prose
from this project's documentation, or the beginning of --text. Each token except the first is
predicted from all tokens before it, whose keys and values come from the cache. "fp8 KV, no
Hadamard" quantizes keys directly, without the Hadamard transform that spreads their outliers. The
script fails if the perplexity changes by more than CASES allows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.gguf import BLOCK_TYPES_KEY
from nanovllm.checkpoint.list_tensors import list_tensors
from nanovllm.checkpoint.quantized.combine import PROJECTION, names_to_quantize
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.devices.cpu.ops import NumbaOps
from nanovllm.ops import fp8
from nanovllm.ops.fp8 import quantize_rows
from nanovllm.ops.interface import LayerCache
from nanovllm.ops.quantized_weight import BLOCK
from tests.ops.quantized_products import quantize_blocks

TEXT = Path(__file__).with_name("perplexity.txt")
MAX_TOKENS = 2200  # tokens of the text that are used
# The baseline of each case, and the largest allowed change of perplexity (inf: no limit).
CASES: dict[str, tuple[str, float]] = {
    "as stored": ("dequantized", 0.001),
    "fp8 KV": ("as stored", 0.005),
    "fp8 KV, no Hadamard": ("as stored", math.inf),
    "fp8 weights": ("dequantized", 0.01),
    "fp8 by output": ("dequantized", 0.01),
    "fp8 by output, all": ("dequantized", math.inf),
    "fp8 by block": ("dequantized", math.inf),
}
BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
BY_OUTPUT = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
}
Parts = dict[str, Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a GGUF file")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    args = parser.parse_args()
    is_within = True
    for dtype in args.dtypes:
        found = measure(args.model, dtype, args.cases, args.text)
        print(f"{args.model}, {dtype}: {found['dequantized']:.4f} dequantized")
        for name in args.cases:
            other, limit = CASES[name]
            loss = found[name] / found[other] - 1
            is_within &= abs(loss) <= limit
            print(f"  {name:<20}{found[name]:9.4f}  {100 * loss:+.3f}% of {other}", flush=True)
    return 0 if is_within else 1


def measure(model: str, dtype: str, names: Sequence[str], text: Path = TEXT) -> dict[str, float]:
    """Return the perplexity of these cases and of their baselines."""
    wanted = dict.fromkeys(other for name in names for other in _needed(name))
    ids = load_tokenizer(find_checkpoint(model)).encode(text.read_text())[:MAX_TOKENS]
    with tempfile.TemporaryDirectory() as folder:
        return {name: _measure_one(model, ids, dtype, name, Path(folder)) for name in wanted}


def _needed(name: str) -> list[str]:
    return [*_needed(CASES[name][0]), name] if name in CASES else [name]


def _measure_one(model: str, ids: list[int], dtype: str, name: str, folder: Path) -> float:
    if name == "fp8 KV, no Hadamard":
        with quantizing_without_hadamard():
            return perplexity(model, ids, dtype, enforce_eager=True)
    if name in ("as stored", "fp8 KV"):
        return perplexity(model, ids, dtype, kv_cache_dtype="fp8" if "KV" in name else "auto")
    config, make = MADE[name]
    write_floats(model, folder, config, make, is_all=name.endswith("all"))
    return perplexity(
        str(folder), ids, dtype, quantization="fp8" if name == "fp8 weights" else None
    )


def perplexity(model: str, ids: list[int], dtype: str, **options: Any) -> float:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(model, device="cpu", dtype=dtype, skip_tokenizer_init=True, **options) as llm:
        (output,) = llm.generate([ids], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    pairs = zip(ids, output.prompt_logprobs, strict=True)
    logprobs = [known[token].logprob for token, known in pairs if known is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


def write_floats(
    model: str,
    folder: Path,
    config: dict[str, Any],
    make: Callable[[Tensor], Parts] | None,
    is_all: bool,
) -> None:
    """Write a GGUF file as safetensors in float32; `make` quantizes the projections."""
    checkpoint = find_checkpoint(model)
    plain = {key: value for key, value in checkpoint.config.items() if key != BLOCK_TYPES_KEY}
    (folder / "config.json").write_text(json.dumps(plain | config))
    tensors: Parts = {}
    stored = list_tensors(checkpoint)
    names = names_to_quantize(stored)
    if is_all:
        names = {tensor.name for tensor in stored if PROJECTION.fullmatch(tensor.name)}
    for tensor in stored:
        values = torch.cat([rows.float() for rows in tensor.read()])
        is_made = make is not None and tensor.name in names and values.dim() == 2
        parts = make(values) if make is not None and is_made else {"weight": values}
        module = tensor.name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")


def round_blocks(values: Tensor) -> Parts:
    quantized = quantize_blocks(values)
    return {"weight": quantized.values, "weight_scale_inv": quantized.scales[::BLOCK]}


def round_outputs(values: Tensor) -> Parts:
    quantized = quantize_rows(values)
    return {"weight": quantized.values, "weight_scale": quantized.scales}


MADE: dict[str, tuple[dict[str, Any], Callable[[Tensor], Parts] | None]] = {
    "dequantized": ({}, None),
    "fp8 weights": ({}, None),
    "fp8 by block": ({"quantization_config": BY_BLOCK}, round_blocks),
    "fp8 by output": ({"quantization_config": BY_OUTPUT}, round_outputs),
    "fp8 by output, all": ({"quantization_config": BY_OUTPUT}, round_outputs),
}


@contextlib.contextmanager
def quantizing_without_hadamard() -> Iterator[None]:
    """Make an unquantized cache store quantized values, which bfloat16 represents exactly."""
    write = NumbaOps.rope_write

    def write_rounded(self: NumbaOps, *args: Any) -> None:
        write(self, *args)
        cache, slot_mapping = args[-2:]
        assert isinstance(cache, LayerCache)
        for part in cache.parts:
            rows = part.view(-1, *part.shape[2:])
            rounded = fp8.quantize(rows[slot_mapping])
            rows[slot_mapping] = fp8.dequantize(rounded, part.dtype)

    with mock.patch.object(NumbaOps, "rope_write", write_rounded):
        yield


if __name__ == "__main__":
    sys.exit(main())
