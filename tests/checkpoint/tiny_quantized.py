"""Quantized weights written by reference formulas, with their dequantized values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = npt.NDArray[Any]
# The output at each position of an AWQ word, from the lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Quantized:
    parts: dict[str, Tensor]
    values: Tensor  # float32


@dataclass(frozen=True)
class Kind:
    """A format, with its quantization_config."""

    make: Callable[..., Quantized]
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, weight: Tensor, seed: int = 0, edges: bool = False) -> Quantized:
        return self.make(weight, np.random.default_rng(seed), edges, **self.options)


def pack_words(numbers: Array, bits: int) -> Tensor:
    """Pack the last dimension into 32-bit words, the first integer in the lowest bits."""
    count = 32 // bits
    padded = np.pad(numbers.astype(np.uint32), ((0, 0), (0, -numbers.shape[1] % count)))
    words = np.zeros((len(padded), padded.shape[1] // count), np.uint32)
    for place in range(count):
        words |= padded[:, place::count] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def pack_awq(numbers: Array) -> Tensor:
    shuffled = numbers.reshape(len(numbers), -1, 8)[:, :, list(AWQ_ORDER)]
    return pack_words(shuffled.reshape(numbers.shape), 4)


def edge_scales(scales: Tensor, rng: np.random.Generator) -> Tensor:
    """Put zeros, negative, smallest and largest values among the scales."""
    limits = torch.finfo(scales.dtype)
    edges = torch.tensor([0.0, -1.0, limits.smallest_normal, limits.smallest_normal / 8, 6e4])
    flat = scales.flatten()
    chosen = rng.choice(len(flat), min(len(edges), len(flat)), replace=False)
    flat[torch.from_numpy(chosen)] = edges[: len(chosen)].to(scales.dtype)
    return flat.view(scales.shape)


def fp8_block(
    weight: Tensor,
    rng: np.random.Generator,
    edges: bool,
    block: tuple[int, int],
    name: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
) -> Quantized:
    (rows, columns), (high, wide) = weight.shape, block
    quantized = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    values = torch.zeros(rows, columns)
    scales = torch.zeros(-(-rows // high), -(-columns // wide), dtype=dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[i * high :, j * wide :][:high, :wide].abs().max() / 448
    scales = edge_scales(scales, rng) if edges else scales
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scale = scales[i, j].float()
            divided = weight[part] / scale if scale else weight[part]
            quantized[part] = divided.clamp(-448, 448).to(torch.float8_e4m3fn)
            values[part] = quantized[part].float() * scale
    return Quantized({"weight": quantized, name: scales}, values)


def fp8_scaled(
    weight: Tensor, rng: np.random.Generator, edges: bool, shape: str = "channel"
) -> Quantized:
    whole = {"channel": weight.abs().amax(1, keepdim=True), "flat": weight.abs().amax(1)}
    largest = whole.get(shape, weight.abs().max())
    scales = (largest / 448).bfloat16() if shape == "channel" else largest / 448
    scales = edge_scales(scales, rng) if edges and scales.dim() else scales
    by_row = scales.float().reshape(-1, 1)
    divided = weight / torch.where(by_row == 0, 1.0, by_row)
    quantized = divided.clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = scales.reshape(1) if shape == "tensor" else scales
    return Quantized({"weight": quantized, "weight_scale": stored}, quantized.float() * by_row)


@dataclass(frozen=True)
class Groups:
    """Unsigned integers by output and input; zero points and scales by output and group."""

    integers: Array
    zeros: Array
    scales: Tensor
    group_of: Array

    @property
    def values(self) -> Tensor:
        """Return (integer - zero) * scale: small integers times a 16-bit float, which is exact."""
        numbers = self.integers.astype(np.int64) - self.zeros.astype(np.int64)[:, self.group_of]
        return torch.from_numpy(numbers).float() * self.scales.float()[:, self.group_of]


def make_groups(
    weight: Tensor,
    rng: np.random.Generator,
    edges: bool,
    bits: int,
    group: int,
    symmetric: bool,
    shuffled: bool,
    dtype: torch.dtype,
) -> Groups:
    rows, columns = weight.shape
    size = columns if group == -1 else group
    group_of = np.arange(columns) // size
    group_of = rng.permutation(group_of) if shuffled else group_of
    num_groups, middle = -(-columns // size), 1 << (bits - 1)
    largest = torch.stack([weight[:, group_of == g].abs().amax(1) for g in range(num_groups)], 1)
    scales = (largest / (middle - 1)).to(dtype)
    scales = edge_scales(scales, rng) if edges else scales
    zeros = np.full((rows, num_groups), middle)
    if not symmetric:
        low = 0 if edges else middle - 2
        zeros = rng.integers(low, 2 * middle if edges else middle + 3, (rows, num_groups))
    by_input = scales.float()[:, group_of].numpy()
    with np.errstate(over="ignore"):
        divided = weight.numpy() / np.where(by_input == 0, 1.0, by_input)
    limit = 4.0 * middle
    steps = np.rint(np.clip(divided, -limit, limit)) + zeros[:, group_of]
    integers = np.clip(steps, 0, 2 * middle - 1).astype(np.int64)
    return Groups(integers, zeros, scales, group_of)


def packed_int(
    weight: Tensor,
    rng: np.random.Generator,
    edges: bool,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    shuffled: bool = False,
    packs_zeros: bool = True,
) -> Quantized:
    groups = make_groups(weight, rng, edges, bits, group, symmetric, shuffled, dtype=torch.bfloat16)
    parts = {
        "weight_packed": pack_words(groups.integers, bits),
        "weight_scale": groups.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric and packs_zeros:
        parts["weight_zero_point"] = pack_words(groups.zeros.T, bits).t().contiguous()
    elif not symmetric:
        signed = groups.zeros - (1 << (bits - 1))
        parts["weight_zero_point"] = torch.from_numpy(signed.astype(np.int8))
    if shuffled:
        parts["weight_g_idx"] = torch.from_numpy(groups.group_of.astype(np.int32))
    return Quantized(parts, groups.values)


def awq(weight: Tensor, rng: np.random.Generator, edges: bool, group: int = 32) -> Quantized:
    groups = make_groups(weight, rng, edges, 4, group, False, False, dtype=torch.float16)
    parts = {
        "qweight": pack_awq(groups.integers.T),
        "qzeros": pack_awq(groups.zeros.T),
        "scales": groups.scales.t().contiguous(),
    }
    return Quantized(parts, groups.values)


def gptq(
    weight: Tensor,
    rng: np.random.Generator,
    edges: bool,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    shuffled: bool = False,
    offset: int = 1,
    has_groups: bool = True,
    borrows: bool = False,
) -> Quantized:
    groups = make_groups(weight, rng, edges, bits, group, symmetric, shuffled, dtype=torch.float16)
    if borrows:  # GPTQModel subtracts from words, so that a zero point of 0 borrows from the next
        ones = sum(offset << bits * place for place in range(32 // bits))
        qzeros = pack_words(groups.zeros.T, bits) - ones
    else:
        stored_zeros = (groups.zeros - offset) % (1 << bits)  # version 1 stores one less
        qzeros = pack_words(stored_zeros.T, bits)
    parts = {
        "qweight": pack_words(groups.integers, bits).t().contiguous(),
        "qzeros": qzeros,
        "scales": groups.scales.t().contiguous(),
    }
    if has_groups:
        parts["g_idx"] = torch.from_numpy(groups.group_of.astype(np.int32))
    return Quantized(parts, groups.values)


def compressed_config(layout: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
    }


def fp8_block_kind(high: int, wide: int, **options: Any) -> Kind:
    config = {"quant_method": "fp8", "weight_block_size": [high, wide]}
    return Kind(fp8_block, config, {"block": (high, wide), **options})


def float_kind(strategy: str, shape: str) -> Kind:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    return Kind(fp8_scaled, compressed_config("float-quantized", weights), {"shape": shape})


def packed_kind(bits: int, group: int, symmetric: bool, shuffled: bool, **options: Any) -> Kind:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    weights |= {"strategy": "channel" if group == -1 else "group"}
    weights |= {"actorder": "group"} if shuffled else {}
    options |= {"bits": bits, "group": group, "symmetric": symmetric, "shuffled": shuffled}
    return Kind(packed_int, compressed_config("pack-quantized", weights), options)


def awq_kind(group: int) -> Kind:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Kind(awq, config, {"group": group})


def gptq_kind(
    bits: int, group: int, symmetric: bool, shuffled: bool, offset: int = 1, **options: Any
) -> Kind:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    config |= {"desc_act": shuffled, "checkpoint_format": "gptq" if offset else "gptq_v2"}
    config |= {"meta": {"quantizer": ["gptqmodel:5.6.12"]}} if options.get("borrows") else {}
    options |= {"bits": bits, "group": group, "symmetric": symmetric}
    return Kind(gptq, config, {**options, "shuffled": shuffled, "offset": offset})


@dataclass(frozen=True)
class Twins:
    """A quantized checkpoint, and the dense one with the same values."""

    quantized: Path
    plain: Path


PROJECTION = re.compile(r"model\.layers\..*(?<!\.gate)\.weight|lm_head\.weight")


def write_twins(folder: Path, source: Path, kind: Kind, ignored: Mapping[str, list[str]]) -> Twins:
    """Quantize every projection of a checkpoint that no pattern excludes."""
    config = json.loads((source / "config.json").read_text())
    patterns = [entry.removeprefix("re:") for entries in ignored.values() for entry in entries]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for i, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        is_left_out = any(re.match(pattern, module) for pattern in patterns)
        if tensor.dim() != 2 or not PROJECTION.fullmatch(name) or is_left_out:
            stored[name] = plain[name] = tensor
            continue
        made = kind(tensor, seed=i)
        plain[name] = made.values
        stored |= {f"{module}.{part}": value for part, value in made.parts.items()}
    quantized = {**config, "quantization_config": {**kind.config, **ignored}}
    for path, tensors, saved in (("quantized", stored, quantized), ("plain", plain, config)):
        (folder / path).mkdir(parents=True)
        (folder / path / "config.json").write_text(json.dumps(saved))
        save_file(tensors, folder / path / "model.safetensors")
    return Twins(folder / "quantized", folder / "plain")
