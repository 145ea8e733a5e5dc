"""Cases for the fused kernels: run by Triton's interpreter on the CPU, compiled on a GPU."""

from __future__ import annotations

import itertools
import math
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nanovllm.devices.cuda import ops as cuda_ops
from nanovllm.devices.cuda.kernels.linear_few_rows import few_rows_config, few_rows_linear
from nanovllm.devices.cuda.kernels.linear_one_row import one_row_linear
from nanovllm.devices.cuda.kernels.step_inputs import gather_decode, gather_tokens, write_words
from nanovllm.devices.cuda.ops import TritonOps
from nanovllm.ops.fp8 import FP8
from nanovllm.ops.interface import (
    Activation,
    LayerCache,
    NormWeights,
    QKNormWeights,
    ResidualStream,
)
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.worker.forward import look_up

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def assert_close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def check_norms_and_gate(dtype: torch.dtype, device: str) -> None:
    for shape in ((1, 64), (3, 576), (5, 1000)):
        residual, update = (make(*shape, dtype=dtype, device=device, seed=i) for i in range(2))
        norm = NormWeights(make(shape[1], dtype=torch.float32, device=device, seed=2), 1e-6)
        for has_update in (False, True):
            got, want = (
                ops.norm(
                    ResidualStream(residual.clone(), update.clone() if has_update else None), norm
                )
                for ops in (TritonOps(), TorchOps())
            )
            for a, b in zip(got, want, strict=True):
                assert_close(a, b)
        got, want = (
            ops.add_norm(residual.clone(), update.clone(), norm)
            for ops in (TritonOps(), TorchOps())
        )
        assert_close(got, want)
        gate_up = 4 * make(shape[0], 2 * shape[1], dtype=dtype, device=device)
        for activation in ACTIVATIONS:
            got, want = (ops.act_and_mul(gate_up, activation) for ops in (TritonOps(), TorchOps()))
            assert_close(got, want)


def check_multiply_sigmoid(dtype: torch.dtype, device: str) -> None:
    """The gate is part of a wider tensor, or has one column."""
    for num_rows, size in ((1, 64), (3, 1500)):
        x, base = (make(num_rows, size, dtype=dtype, device=device, seed=i) for i in range(2))
        wide = make(num_rows, size + 7, dtype=dtype, device=device, seed=2)
        for gate, added in itertools.product((wide[:, :size], wide[:, :1]), (None, base)):
            ops = TritonOps(), TorchOps()
            got, want = (each.multiply_sigmoid(x.clone(), gate, added) for each in ops)
            assert_close(got, want)


def check_rope_write(dtype: torch.dtype, device: str) -> None:
    """q and the cache equal the reference's, and nothing else is written."""
    for (head_dim, num_heads, num_kv_heads), normed in itertools.product(
        ((64, 9, 3), (80, 4, 2), (96, 5, 1), (128, 16, 8)), ("nothing", "heads", "all heads")
    ):
        num_tokens = 5
        # The tokens are apart, as they are behind the gates of an attention output.
        num_apart = 1 + num_heads + 2 * num_kv_heads
        qkv = make(num_tokens, num_apart, head_dim, dtype=dtype, device=device)
        num_tables = 4 if head_dim == 96 else 2  # with 4, q has its own cosines and sines
        rope = make(100, num_tables, head_dim // 2, dtype=torch.float32, device=device)
        shapes = [(head_dim,)] * 2
        if normed == "all heads":
            shapes = [(num_heads, head_dim), (num_kv_heads, head_dim)]
        weights = [
            make(*shape, dtype=torch.float32, device=device, seed=i)
            for i, shape in enumerate(shapes)
        ]
        norm = None if normed == "nothing" else QKNormWeights(*weights, 1e-6, normed == "all heads")
        positions = torch.tensor([0, 99, 7, 7, 50], device=device)
        slot_mapping = torch.tensor([3, 63, 0, 17, 40], device=device)
        results = []
        for ops in (TritonOps(), TorchOps()):
            turned = qkv.clone()[:, 1:]
            shape = (4, 16, num_kv_heads, head_dim)
            caches = [torch.full(shape, 5.0, dtype=dtype, device=device) for _ in range(2)]
            ops.rope_write(turned, norm, rope, positions, LayerCache(*caches), slot_mapping)
            results.append((turned[:, :num_heads], *caches))
        for got, want in zip(*results, strict=True):
            assert_close(got, want)


def check_rope_write_quantizes(dtype: torch.dtype, device: str) -> None:
    """FP8 values and exponents equal the reference's bit for bit, and nothing else is written."""
    for head_dim, num_heads, num_kv_heads in ((64, 9, 3), (80, 4, 2), (128, 16, 8)):
        # Small integers times powers of two have exact sums in any order.
        qkv = make(8, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
        qkv = (4 * qkv).round()
        qkv[:, :, 0] *= 8  # an outlier column
        qkv[1] *= 2.0**-9
        qkv[2] = 0.0
        qkv[3] *= 2.0**7
        for row, value in ((5, math.nan), (6, math.inf), (7, -math.inf)):
            qkv[row, num_heads:, 3] = value
        turn_nothing = torch.tensor([1.0, 0.0], device=device).repeat_interleave(head_dim // 2)
        positions = torch.zeros(8, dtype=torch.int64, device=device)
        slot_mapping = torch.tensor([3, 63, 0, 17, 40, 41, 15, 16], device=device)
        results = []
        for ops in (TritonOps(), TorchOps()):
            shape = (4, 16, num_kv_heads, head_dim)
            codes = [torch.full(shape, 5, dtype=torch.uint8, device=device) for _ in range(2)]
            exponents = [part[..., 0].transpose(1, 2).contiguous() for part in codes]
            cache = LayerCache(*(part.view(FP8) for part in codes), *exponents)
            rope = turn_nothing.view(1, 2, -1)
            turned = qkv.clone()
            ops.rope_write(turned, None, rope, positions, cache, slot_mapping)
            results.append((turned[:, :num_heads], *codes, *exponents))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def check_padding_is_not_written(device: str) -> None:
    qkv = make(2, 6, 64, dtype=torch.float32, device=device)
    rope = make(4, 2, 32, dtype=torch.float32, device=device)
    caches = [torch.zeros(1, 16, 2, 64, device=device) for _ in range(2)]
    positions, slot_mapping = (torch.tensor(v, device=device) for v in ([0, 1], [-1, 2]))
    TritonOps().rope_write(qkv, None, rope, positions, LayerCache(*caches), slot_mapping)
    for cache in caches:
        assert cache[0].any(-1).any(-1).nonzero().flatten().tolist() == [2]


def check_one_row_linear(dtype: torch.dtype, device: str) -> None:
    """Every combination of bias, gate, norm and update equals the separate operations."""
    sizes = [(34, 70), (8, 2048), (6, 3000)]
    if device != "cpu":  # the interpreter takes milliseconds per CTA
        sizes += [(40, 2048), (64, 300), (4100, 96)]
    flags = (False, True)
    for (num_out, num_in), has_bias, activation, kind in itertools.product(
        sizes, flags, (None, *ACTIVATIONS), ("alone", "norm", "update")
    ):
        weight = make(num_out, num_in, dtype=dtype, device=device) / num_in**0.5
        bias = make(num_out, dtype=dtype, device=device) if has_bias else None
        x = make(1, num_in, dtype=dtype, device=device)
        update = None
        if kind == "update":
            update = make(1, num_in, dtype=dtype, device=device, seed=9)
        composed = TorchOps().pack_linear(weight, bias, activation, allow_copy=False)
        if kind == "alone":
            got, _ = one_row_linear(ResidualStream(x), None, weight, bias, activation)
            assert_close(got, composed(x))
            continue
        norm = NormWeights(make(num_in, dtype=torch.float32, device=device, seed=8), 1e-6)
        normed = torch.empty_like(x)
        got, residual = one_row_linear(
            ResidualStream(x, update), norm, weight, bias, activation, normed=normed
        )
        want, want_residual = composed.after_norm(ResidualStream(x.clone(), update), norm)
        assert_close(got, want)
        assert_close(residual, want_residual)
        assert_close(normed, TorchOps().norm(ResidualStream(want_residual), norm)[0])


def check_few_rows_linear(dtype: torch.dtype, device: str) -> None:
    """Sizes that do and do not fill the tiles; partial sums add up to the product."""
    for num_rows, num_out, num_in, activation, num_splits, has_bias in (
        (2, 64, 128, None, 1, False),
        (5, 200, 96, None, 1, True),
        (17, 128, 200, None, 2, True),
        (130, 96, 128, "silu", 1, False),
        (3, 100, 72, "gelu_tanh", 1, True),
        (64, 64, 512, None, 4, False),
        (33, 64, 320, None, 4, True),
    ):
        weight_rows = num_out if activation is None else 2 * num_out
        weight = make(weight_rows, num_in, dtype=dtype, device=device) / num_in**0.5
        bias = make(weight_rows, dtype=dtype, device=device) if has_bias else None
        x = make(num_rows, num_in, dtype=dtype, device=device)
        want = TorchOps().pack_linear(weight, bias, activation, allow_copy=False)(x)
        config = few_rows_config(weight, num_rows, num_splits)
        got = few_rows_linear(x, weight, bias, activation, None, config)
        if num_splits > 1:
            assert got.shape == (num_splits, *want.shape)
            got = got.sum(0).to(dtype)
        assert_close(got, want)


def check_lm_head(dtype: torch.dtype, device: str) -> None:
    """Logits of any number of rows, with and without a norm, are float32 and not rounded."""
    weight = make(200, 256, dtype=dtype, device=device) / 16
    packed = TritonOps().pack_lm_head(weight, allow_copy=False)
    norm = NormWeights(torch.full((256,), 0.5, device=device), 0.0)
    for num_rows in (1, 2, 33) if device == "cpu" else (0, 1, 2, 33, 65, 300):
        # The norm is exact too: each row has a mean square of 1.
        x = make(num_rows, 256, dtype=dtype, device=device).sign()
        got, want = packed(x), x.double() @ weight.double().t()
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        got, _ = packed.after_norm(ResidualStream(x), norm)
        torch.testing.assert_close(got.double(), want / 2, rtol=1e-5, atol=1e-5)


def check_projections_of_any_number_of_rows(dtype: torch.dtype, device: str) -> None:
    """Results are correct for any kernel, and for partial sums left to the norm."""
    weight = make(96, 512, dtype=dtype, device=device) / 16
    after_weight = make(192, 96, dtype=dtype, device=device) / 10
    norm = NormWeights(make(96, dtype=torch.float32, device=device, seed=8), 1e-6)
    if device == "cpu":  # the interpreter takes milliseconds per row
        cases, add_rows = [(0, False), (1, True), (2, False), (16, True), (20, False)], 20
    else:
        cases = [*itertools.product((0, 1, 2, 16, 65, 257, 300), (False, True))]
        add_rows = 300
    for num_rows, has_bias in cases:
        bias = make(96, dtype=dtype, device=device) if has_bias else None
        x = make(num_rows, 512, dtype=dtype, device=device)
        residual = make(num_rows, 96, dtype=dtype, device=device)
        results = []
        for ops in (TritonOps(), TorchOps()):
            first = ops.pack_linear(weight, bias, None, allow_copy=False)
            second = ops.pack_linear(after_weight, None, "silu", allow_copy=False)
            with patch.object(cuda_ops, "MIN_FUSED_ADD_ROWS", add_rows):
                hidden = first.add_to(residual.clone(), x)
            results.append(second.after_norm(hidden, norm))
        for got, want in zip(*results, strict=True):
            assert_close(got, want)


def check_gather_decode(device: str) -> None:
    """Check a few rows by hand, and more rows than one CTA handles."""
    lengths = torch.tensor([3, 17, 1, 64, 33, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([4, 0, 5, 3, 2], dtype=torch.int32, device=device)  # slot 5 is padding
    input_ids, positions, slot_mapping, context_lens, order = gathered(slots, lengths)
    assert input_ids == [4 * 64 + 32, 2, 0, 3 * 64 + 63, 2 * 64]
    assert positions == [32, 2, 0, 63, 0]
    assert slot_mapping == [18 * 16, 2, -1, 15 * 16 + 15, 8 * 16]
    assert context_lens == [33, 3, 0, 64, 1]
    assert order == [3, 0, 1, 4, 2]
    slots = torch.tensor([4, 4, 5, 5, 0, 4], dtype=torch.int32, device=device)  # with two drafts
    input_ids, positions, slot_mapping, context_lens, order = gathered(slots, lengths)
    assert positions == [30, 31, 0, 0, 2, 32]
    assert input_ids == [4 * 64 + 30, 4 * 64 + 31, 0, 0, 2, 4 * 64 + 32]
    assert context_lens == [31, 32, 0, 0, 3, 33]
    assert order == [0, 1, 5, 4, 2, 3]
    for num_rows in (129, 1100):
        generator = torch.Generator().manual_seed(num_rows)
        lengths = torch.randint(0, 65, (num_rows,), generator=generator).int().to(device)
        slots = torch.randperm(num_rows, generator=generator).int().to(device)
        input_ids, positions, slot_mapping, context_lens, order = gathered(slots, lengths)
        want = lengths[slots.long()].cpu()
        last = (want - 1).clamp(min=0)
        assert context_lens == want.tolist()
        assert positions == last.tolist()
        is_used, lines = want > 0, slots.cpu()
        assert input_ids == torch.where(is_used, lines * 64 + last, 0).tolist()
        cached = (lines * 4 + last // 16) * 16 + last % 16
        assert slot_mapping == torch.where(is_used, cached, -1).tolist()
        assert order == want.argsort(descending=True, stable=True).tolist()


def gathered(slots: Tensor, lengths: Tensor) -> list[list[int]]:
    """Return gather_decode's results if token i of slot s is 64 s + i and block i is 4 s + i.

    In a second group, block i is 4 s + i + 1000.
    """
    num_lines, num_rows, device = len(lengths), len(slots), slots.device
    tokens = torch.arange(num_lines * 64, dtype=torch.int32, device=device).view(num_lines, 64)
    first = torch.arange(num_lines * 4, dtype=torch.int32, device=device).view(num_lines, 4)
    block_tables = torch.stack((first, first + 1000), 1)
    input_ids, context_lens, order = torch.zeros(3, num_rows, dtype=torch.int32, device=device)
    positions, *mappings = token_columns = torch.zeros(
        3, num_rows, dtype=torch.int64, device=device
    )
    columns = (input_ids, positions, token_columns[1:], context_lens, order)
    offsets = 1000 * torch.arange(num_lines, dtype=torch.int32, device=device)
    gather_decode(slots, lengths, tokens, block_tables, offsets, 16, columns)
    positions -= offsets[slots.long()] * (context_lens > 0)
    distance = torch.where(mappings[0] < 0, 0, 1000 * 16)
    assert mappings[1].tolist() == (mappings[0] + distance).tolist()
    columns = (input_ids, positions, mappings[0], context_lens, order)
    return [column.tolist() for column in columns]


def check_gather_tokens(device: str) -> None:
    """Check as many tokens as one CTA handles, and more; the columns begin anywhere."""
    generator = torch.Generator().manual_seed(0)
    num_slots, block_size = 5, 16
    tokens = torch.randint(0, 1000, (num_slots + 1, 64), generator=generator).int()
    block_tables = torch.randint(0, 99, (num_slots + 1, 3, 4), generator=generator).int()
    for num_tokens in (1, 256, 700):
        sent = torch.randint(0, num_slots + 1, (2 * num_tokens + 1,), generator=generator).int()
        sent[1 + num_tokens :] = torch.randint(0, 64, (num_tokens,), generator=generator)
        slots, positions = sent[1:].long().view(2, -1)
        tables: Any = SimpleNamespace(
            tokens=tokens, block_tables=block_tables, block_size=block_size
        )
        input_ids, slot_mapping = look_up(tables, slots, positions)
        input_ids[slots == num_slots], slot_mapping[:, slots == num_slots] = 0, -1  # padding
        columns = sent.to(device)[1:].view(2, -1)
        wanted = input_ids, positions, slot_mapping
        got = tuple(torch.zeros_like(x, device=device) for x in wanted)
        offsets = torch.arange(num_slots + 1, dtype=torch.int32)
        state = (each.to(device) for each in (tokens, block_tables, offsets))
        gather_tokens(*columns, *state, block_size, got)
        positions += offsets[slots] * (slots < num_slots)
        for mine, want in zip(got, wanted, strict=True):
            assert mine.dtype == want.dtype
            assert mine.tolist() == want.tolist()


def check_write_words(device: str) -> None:
    """Only the first `count` pairs are written; the others may hold any offset."""
    for num_pairs, count in ((4, 0), (4, 3), (1500, 1400), (1500, 2000)):
        words = torch.zeros(4000, dtype=torch.int32, device=device)
        offsets = torch.randperm(4000, generator=torch.Generator().manual_seed(count))[:num_pairs]
        pairs = torch.stack((offsets, offsets + 7), 1).int()
        pairs[count:, 0] = 2**30
        write_words(words, pairs.to(device), words.new_tensor([count]))
        want = torch.zeros(4000, dtype=torch.int32)
        want[offsets[:count]] = (offsets[:count] + 7).int()
        assert words.tolist() == want.tolist()


def main(which: str) -> None:
    dtype = torch.float32 if which == "some" else torch.float16
    check_norms_and_gate(dtype, "cpu")
    check_multiply_sigmoid(dtype, "cpu")
    check_rope_write(dtype, "cpu")
    check_rope_write_quantizes(dtype, "cpu")
    check_projections_of_any_number_of_rows(dtype, "cpu")  # one row among them
    if which == "rest":
        for dtype in (torch.float32, torch.float16):
            check_one_row_linear(dtype, "cpu")
        return
    check_few_rows_linear(torch.float16, "cpu")
    check_lm_head(torch.float16, "cpu")
    check_padding_is_not_written("cpu")
    check_gather_decode("cpu")
    check_gather_tokens("cpu")
    check_write_words("cpu")


if __name__ == "__main__":
    main(sys.argv[1])
