"""Attention of the persistent step on numpy, one CTA after another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.ops.torch_ops import rms_norm, rotate
from tests.devices.cuda.persistent import gluon_on_numpy
from tests.devices.cuda.persistent.gluon_on_numpy import Pointer, load_modules

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from nanovllm.devices.cuda.persistent.sizes import StepShape

NAMES = "sizes", "tile_mma", "exchange", "attention"
EPS, BLOCK_SIZE, MAX_CONTEXT = 1e-6, 32, 512


@pytest.fixture(scope="module")
def modules() -> Any:
    loaded = load_modules(*NAMES)
    found = SimpleNamespace(**dict(zip(NAMES, loaded, strict=True)))
    found.attention.Attention.prefetch = lambda *args: None
    return found


class Model:
    """Random q, k and v of some rows, and a random KV cache."""

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
        order = torch.randperm(num_blocks, generator=self.random)
        self.table = order.view(9, -1).int()
        frequencies = 1e4 ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(MAX_CONTEXT)[:, None] * frequencies
        self.rope = torch.stack((angles.cos(), angles.sin()), dim=1)

    def draw(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.random).bfloat16()

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
    caches = [words(cache).copy() for cache in (model.k, model.v)]
    k_cache, v_cache = map(Pointer, caches)
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
            k = attention.load_unit_keys(segment, begin, offsets, k_cache)
            v = attention.load_unit_values(segment, begin, offsets, v_cache)
            attention.rotate_heads(segment, heads, norms, parameters, 1)
            attention.attend(segment, heads, k_cache, v_cache, 0, k, v, 1)
            split = split + num_splits
    for qkv.cta in range(128):
        attention.merge(to, attention.active(), 1)
    assert (parts == -1).all(), "the reader of a part clears it"
    assert (output[0, ..., : shape.q] == -1).all(), (
        "the writer of a value clears the previous buffer"
    )
    assert np.array_equal(output[1, 0], output[1, 1])
    for cache, new in zip(caches, (model.new_k, model.new_v), strict=True):
        written = torch.from_numpy(cache).view(torch.bfloat16).float()
        assert torch.allclose(written, new.flatten(), atol=0.02, rtol=0.01)
    return torch.from_numpy(output[1, 0][:, : shape.q].copy()).view(torch.bfloat16)


def words(values: Tensor) -> np.ndarray:
    return values.flatten().view(torch.int32).numpy()


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


@pytest.mark.parametrize(("heads", "slots", "verifies", "window"), PAIRWISE, ids=str)
def test_equals_the_softmax(
    modules: Any, heads: tuple[int, int, int], slots: list[int], verifies: bool, window: int | None
) -> None:
    """Covers separate rows, padding, and consecutive tokens whose keys are not in the cache yet."""
    model = Model(StepShape(256, *heads, 512, 1000), len(slots), window)
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
