"""Attention of the persistent step on numpy, one CTA after another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.ops import fp8
from nanovllm.ops.torch_ops import rms_norm, rotate
from tests.devices.cuda.persistent import gluon_on_numpy
from tests.devices.cuda.persistent.gluon_on_numpy import Pointer, load_modules

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from nanovllm.devices.cuda.persistent.sizes import StepShape

NAMES = "sizes", "tile_mma", "exchange", "fp8_heads", "attention"
EPS, BLOCK_SIZE, MAX_CONTEXT = 1e-6, 32, 512


@pytest.fixture(scope="module")
def modules() -> Any:
    loaded = load_modules(*NAMES)
    found = SimpleNamespace(**dict(zip(NAMES, loaded, strict=True)))
    found.attention.Attention.prefetch = lambda *args: None
    return found


class Model:
    """Random q, k and v of some rows, and a random KV cache, which may be FP8."""

    def __init__(self, shape: StepShape, num_rows: int, window: int | None) -> None:
        self.shape, self.num_rows, self.window = shape, num_rows, window
        self.random = torch.Generator().manual_seed(0)
        dim = shape.head_dim
        self.qkv = self.draw(num_rows, shape.qkv)
        self.norms = 1 + 0.1 * self.draw(2, dim)
        num_blocks = 9 * MAX_CONTEXT // BLOCK_SIZE
        self.k, self.v = (
            self.draw(num_blocks, BLOCK_SIZE, shape.num_kv_heads, dim) for _ in range(2)
        )
        if self.is_fp8:
            sizes = 1 + self.draw(*self.k.shape[:-1], 1).exp2()
            self.k, self.v = self.as_cached(sizes * self.k), self.as_cached(self.v / sizes)
        order = torch.randperm(num_blocks, generator=self.random)
        self.table = order.view(9, -1).int()
        frequencies = 1e4 ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(MAX_CONTEXT)[:, None] * frequencies
        self.rope = torch.stack((angles.cos(), angles.sin()), dim=1)

    def draw(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.random).bfloat16()

    @property
    def is_fp8(self) -> bool:
        return self.shape.cache_bits == 8

    def as_cached(self, rows: Tensor) -> Tensor:
        """Return the values of rows once they are in the cache."""
        return fp8.dequantize(fp8.quantize(rows), torch.bfloat16) if self.is_fp8 else rows

    def memories(self) -> list[np.ndarray]:
        """The caches of keys and values as the kernel gets them, and any exponents."""
        if not self.is_fp8:
            return [words(cache).copy() for cache in (self.k, self.v)]
        rows = [fp8.quantize(cache) for cache in (self.k, self.v)]
        exponents = [each.exponents.transpose(1, 2).flatten().numpy() for each in rows]
        return [*(words(each.values) for each in rows), *exponents]

    def read(self, memories: list[np.ndarray]) -> list[Tensor]:
        """Return the values of caches in the format of `memories`."""
        if not self.is_fp8:
            return [torch.from_numpy(each).view(torch.bfloat16).float() for each in memories]
        found = []
        for rows, exponents in zip(memories[:2], memories[2:], strict=True):
            values = torch.from_numpy(rows).view(fp8.FP8).view(self.k.shape)
            blocks = torch.from_numpy(exponents).view(*self.k.shape[:1], -1, BLOCK_SIZE)
            each = fp8.Fp8Rows(values, blocks.transpose(1, 2))
            found.append(fp8.dequantize(each, torch.float32).flatten())
        return found

    def wanted(self, slots: list[int], lengths: list[int], verifies: bool) -> Tensor:
        """Reference output of each row; stores the new keys and values row by row."""
        dim, num_kv_heads = self.shape.head_dim, self.shape.num_kv_heads
        k_cache, v_cache = self.k.float(), self.v.float()
        found = torch.zeros(self.num_rows, self.shape.q)
        for row, slot in enumerate(slots):
            length = lengths[slot] - (slots[row + 1 :].count(slot) if verifies else 0)
            if length <= 0:
                continue
            heads = self.qkv[row].float().view(-1, dim)
            q, k, v = heads.split([self.shape.num_heads, num_kv_heads, num_kv_heads])
            angles = self.rope[length - 1]
            q, k = (
                rotate(rms_norm(x, norm.float(), EPS), angles[0], angles[1])
                for x, norm in zip((q, k), self.norms, strict=True)
            )
            if self.is_fp8:
                q, k = (
                    fp8.hadamard_transform(x.bfloat16(), exponent)
                    for x, exponent in zip((q, k), fp8.hadamard_exponents(dim), strict=True)
                )
                k, v = (self.as_cached(x).float() for x in (k, v))
            positions = torch.arange(length)
            blocks, block_offsets = (
                self.table[slot, positions // BLOCK_SIZE],
                positions % BLOCK_SIZE,
            )
            k_cache[blocks[-1], block_offsets[-1]], v_cache[blocks[-1], block_offsets[-1]] = k, v
            seen = slice(0 if self.window is None else max(length - self.window, 0), length)
            keys, values = (
                cache[blocks, block_offsets][seen].repeat_interleave(
                    self.shape.num_heads // num_kv_heads, 1
                )
                for cache in (k_cache, v_cache)
            )
            weights = (torch.einsum("hd,khd->hk", q, keys) * dim**-0.5).softmax(-1)
            found[row] = torch.einsum("hk,khd->hd", weights, values).flatten()
        self.new_k, self.new_v = k_cache, v_cache
        return found


def run(modules: Any, model: Model, slots: list[int], lengths: list[int], verifies: bool) -> Tensor:
    """Run `attend` in every CTA, then `merge` in every CTA."""
    shape, rows, sizes = model.shape, model.num_rows, modules.sizes
    memory = np.full((3, 2, rows, sizes.num_chunks(shape.qkv) * 1024), -1, np.int16)
    memory[..., : shape.qkv] = model.qkv.view(torch.int16).numpy()
    width = sizes.num_chunks(shape.q) * 1024
    output = np.full((3, 2, rows, width), -1, np.int16)
    num_splits = sizes.num_splits(shape.num_kv_heads)
    count = 3 * rows * sizes.num_output_groups(shape.q) * num_splits * sizes.PARTIAL_WORDS
    parts = np.full(count, -1, np.int32)
    memories = model.memories()
    caches = tuple(map(Pointer, memories))
    parameters = SimpleNamespace(
        rope=Pointer(model.rope.numpy().reshape(-1)), eps=EPS, has_norm=True,
        scale=shape.head_dim**-0.5 * 1.4426950408889634,
    )  # fmt: skip
    qkv = SimpleNamespace(flag=Pointer(np.zeros(1, np.int32)), size=memory.shape[-1])
    qkv.address = lambda buffer: Pointer(
        memory.reshape(-1), (buffer * 2 + qkv.cta % 2) * rows * qkv.size
    )
    to = SimpleNamespace(memory=Pointer(output.reshape(-1)), size=width)
    tables = [np.array(each, np.int32) for each in (slots, lengths, model.table.flatten().tolist())]
    window = -1 if model.window is None else model.window
    attention = modules.attention.Attention(
        *map(Pointer, tables), model.table.shape[1], window, Pointer(parts), qkv, shape, BLOCK_SIZE,
        rows, rows if verifies else 1, model.window is not None,
    )  # fmt: skip
    for qkv.cta in range(128):
        norms = attention.load_norms(Pointer(words(model.norms)))
        heads = attention.allocate_heads()
        ends, split, last = attention.divide_splits()
        while split < last:
            segment, num_splits = attention.segment(ends, split, last)
            offsets, begin = attention.find_unit(segment, segment.first), segment.first
            k = attention.load_unit_keys(segment, begin, offsets, caches)
            v = attention.load_unit_values(segment, begin, offsets, caches)
            attention.rotate_heads(segment, heads, norms, parameters, 1)
            attention.attend(segment, heads, caches, 0, k, v, 1)
            split = split + num_splits
    for qkv.cta in range(128):
        attention.merge(to, attention.active(), 1)
    assert (parts == -1).all(), "the reader of a part clears it"
    assert (output[0, ..., : shape.q] == -1).all(), (
        "the writer of a value clears the previous buffer"
    )
    assert np.array_equal(output[1, 0], output[1, 1])
    for written, new in zip(model.read(memories), (model.new_k, model.new_v), strict=True):
        # Values close to the boundary between two FP8 values may be rounded either way.
        rtol = 0.13 if model.is_fp8 else 0.01
        assert torch.allclose(written, new.flatten(), atol=0.02, rtol=rtol)
    return torch.from_numpy(output[1, 0][:, : shape.q].copy()).view(torch.bfloat16)


def words(values: Tensor) -> np.ndarray:
    return values.flatten().view(torch.uint8).view(torch.int32).numpy()


LENGTHS = [0, 1, 65, 64, 129, 500, 33, 2, 130]


HEADS, WINDOWS = [(4, 2, 128), (14, 2, 64)], [None, 70]
ROWS = [
    ([5], False), ([4, 0], False), ([5, 1, 0, 8], False), ([8] * 8, True), ([2, 2, 5, 5], True)
]  # fmt: skip
PAIRWISE = [
    (heads, *rows, WINDOWS[(i + j) % 2])
    for i, heads in enumerate(HEADS)
    for j, rows in enumerate(ROWS)
]


@pytest.mark.parametrize("cache_bits", [16, 8])
@pytest.mark.parametrize(("heads", "slots", "verifies", "window"), PAIRWISE, ids=str)
def test_equals_the_softmax(
    modules: Any,
    heads: tuple[int, int, int],
    slots: list[int],
    verifies: bool,
    window: int | None,
    cache_bits: int,
) -> None:
    """Covers separate rows, padding, and consecutive tokens whose keys are not in the cache yet."""
    shape = StepShape(256, *heads, 512, 1000, cache_bits=cache_bits)
    model = Model(shape, len(slots), window)
    wanted = model.wanted(slots, LENGTHS, verifies)
    found = run(modules, model, slots, LENGTHS, verifies).float()
    assert torch.allclose(found, wanted, atol=0.03, rtol=0.03)
    assert torch.equal(found.count_nonzero(1) > 0, wanted.count_nonzero(1) > 0)


def test_only_existing_parts_are_polled(modules: Any) -> None:
    """A thread polls two partial results: one is stored late, the other's split has no keys."""
    sizes, attention = modules.sizes, modules.attention
    parts = np.full((2, sizes.PARTIAL_WORDS), -1, np.int32)

    def store() -> None:
        parts[0] = range(1, 13)

    offsets = Pointer(parts.reshape(-1), np.arange(2) * sizes.PARTIAL_WORDS, store)
    found = gluon_on_numpy.inline_asm(
        attention.poll_partials_asm(2), attention.registers(20, 4, 2),
        [offsets, offsets, np.array([1, 0])], ("int32",) * 10, False, 2,
    )  # fmt: skip
    first, second = np.stack(found, 1)
    assert first.tolist() == [*range(1, 11)]
    assert second.tolist() == [0] * 8 + [np.float32(-1e30).view(np.int32), 0]


@pytest.mark.parametrize("dim", [64, 128])
def test_new_rows_are_quantized_like_all_others(modules: Any, dim: int) -> None:
    """Rows of all magnitudes, in the order of head vectors: queries, keys, values; bit for bit."""
    shape = StepShape(256, 6, 2, dim, 512, 1000, cache_bits=8)
    attention = modules.attention.Attention(
        *(None,) * 7, shape, BLOCK_SIZE, rows=1, new=1, has_window=False
    )
    vectors = torch.randn(8, dim, generator=torch.Generator().manual_seed(0))
    vectors *= 2.0 ** torch.tensor([0, 3, -9, 40, 20, -30, 1, 2]).unsqueeze(1)
    vectors[4, :2] = 1e-9  # keys: vector 3; values: vector 4
    heads = attention.allocate_heads()
    parts = vectors.view(8, 2, dim // 4, 2).numpy()
    lanes = [gluon_on_numpy.array(parts[:, n // 2, :, n % 2]) for n in range(4)]
    vector = np.arange(8)[:, None]
    attention.quantize_heads(heads, lanes, vector < 3, vector >= 4)

    rounded = vectors.bfloat16()
    of_queries, of_keys = fp8.hadamard_exponents(dim)
    queries = fp8.hadamard_transform(rounded[:3], of_queries)
    rows = fp8.quantize(torch.cat((fp8.hadamard_transform(rounded[3:4], of_keys), rounded[4:5])))
    found, quantized, exponents = (torch.from_numpy(each.values) for each in heads)
    assert torch.equal(quantized.view(torch.uint8)[3:5], rows.values.view(torch.uint8))
    assert torch.equal(exponents[3:5], rows.exponents.int())
    scales = fp8.power_of_two(exponents[:3]).unsqueeze(1)
    assert torch.equal(exponents[:3], fp8.quantize(queries).exponents.int())
    assert torch.equal(found[:3], (queries / scales).half())
