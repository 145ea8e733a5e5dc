"""The compiled CPU operations equal plain torch for any shape, and rows are independent."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from nanovllm.config import RecurrentConfig, RopeConfig
from nanovllm.devices.cpu.features import find_cpu_features
from nanovllm.devices.cpu.ops import MAX_LINEAR_ROWS, NumbaOps
from nanovllm.devices.cpu.program import Launcher
from nanovllm.layers.rotary_embedding import rope_table
from nanovllm.ops.fp8 import FP8
from nanovllm.ops.interface import (
    Activation,
    LayerCache,
    NormWeights,
    PackedLinear,
    QKNormWeights,
    RecurrentRows,
    ResidualStream,
)
from nanovllm.ops.torch_ops import TorchOps
from tests.ops.delta_nets import random_inputs, random_state

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
pytestmark = pytest.mark.usefixtures("one_thread")
ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
SEVERAL_THREADS = pytest.mark.usefixtures("num_threads")
# Sizes around multiples of threads, streams, vector lanes and cache lines.
SHAPES = [(1, 1), (1, 33), (33, 1), (7, 5), (33, 70), (64, 64), (127, 65), (65, 255), (300, 96)]
NUM_ROWS = (0, 1, 2, 3, 4, 5, 15, 16, 17, 100)  # 0: a step with only partial chunks samples nothing
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # relative error of one operation
EPS = 1e-6

torch_ops = TorchOps()


@cache
def numba_ops(dtype: torch.dtype, num_threads: int) -> NumbaOps:
    """Create ops; the launcher uses torch's current number of threads."""
    assert torch.get_num_threads() == num_threads
    return NumbaOps(Launcher(dtype), find_cpu_features())


def make_ops(dtype: torch.dtype) -> NumbaOps:
    return numba_ops(dtype, torch.get_num_threads())


def make(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_integers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return values whose products add up exactly in float32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )


# Matrix products


@SEVERAL_THREADS
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_of_integers_is_exact(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every output is the exact sum, rounded once to nearest, ties to even."""
    ops = make_ops(dtype)
    weight = make_integers(*shape, dtype=dtype)
    for bias in (None, make_integers(shape[0], dtype=dtype, seed=1)):
        for allow_copy in (True, False):
            linear = ops.pack_linear(weight.clone(), bias, None, allow_copy)
            for num_rows in NUM_ROWS:
                x = make_integers(num_rows, shape[1], dtype=dtype, seed=num_rows)
                want = exact_linear(x, weight, bias).to(dtype)
                assert torch.equal(linear(x), want), (bias is None, allow_copy, num_rows)


@DTYPES
@pytest.mark.parametrize("allow_copy", [True, False], ids=["room", "no-room"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [*SHAPES, (576, 1536)], ids=str)
def test_linear_is_as_close_as_float32_sums(
    shape: tuple[int, int], has_bias: bool, allow_copy: bool, dtype: torch.dtype
) -> None:
    weight = make(*shape, dtype=dtype)
    bias = make(shape[0], dtype=dtype, seed=1) if has_bias else None
    linear = make_ops(dtype).pack_linear(weight.clone(), bias, None, allow_copy)
    for num_rows in NUM_ROWS:
        x = make(num_rows, shape[1], dtype=dtype, seed=num_rows)
        got, want = linear(x), exact_linear(x, weight, bias)
        assert (got.shape, got.dtype) == (want.shape, dtype)
        size_of_terms = exact_linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
        bound = 8 * 2.0**-24 * size_of_terms + ROUNDING[dtype] * want.abs()
        assert bool(((got.double() - want).abs() <= bound).all()), num_rows


@DTYPES
@pytest.mark.parametrize("ops", [TorchOps(), None], ids=["torch", "numba"])
def test_logits_are_float32(ops: TorchOps | None, dtype: torch.dtype) -> None:
    """Sums of integers that bfloat16 would round are exact."""
    weight = make_integers(70, 576, dtype=dtype)
    lm_head = (ops or make_ops(dtype)).pack_lm_head(weight, True)
    for num_rows in NUM_ROWS:
        x = make_integers(num_rows, 576, dtype=dtype, seed=num_rows)
        got, want = lm_head(x), exact_linear(x, weight, None)
        assert got.dtype == torch.float32
        assert torch.equal(got.double(), want), num_rows
        assert num_rows < 2 or not torch.equal(want, want.bfloat16().double())


@DTYPES
@pytest.mark.parametrize("allow_copy", [True, False], ids=["room", "no-room"])
def test_linear_takes_views_and_strided_inputs(allow_copy: bool, dtype: torch.dtype) -> None:
    """A weight may be a slice of a merged one; x may be a slice of a wider activation."""
    rows, columns = make_integers(96, 48, dtype=dtype), make_integers(48, 96, dtype=dtype)
    bias = make_integers(128, dtype=dtype, seed=1)[32:96]
    wide = make_integers(40, 96, dtype=dtype, seed=2)
    for weight in (rows[16:80], columns.t()[16:80], make_integers(64, 60, dtype=dtype)[:, 5:53]):
        linear = make_ops(dtype).pack_linear(weight, bias, None, allow_copy)
        for num_rows in (1, 6, 40):
            for x in (wide[:num_rows, 24:72], wide.t()[:48, :num_rows].t()):
                want = exact_linear(x, weight, bias).to(dtype)
                assert torch.equal(linear(x), want)


@DTYPES
@pytest.mark.parametrize("allow_copy", [True, False], ids=["room", "no-room"])
def test_linear_keeps_the_weight_and_leaves_it_as_it_was(
    allow_copy: bool, dtype: torch.dtype
) -> None:
    weight, bias = make_integers(96, 64, dtype=dtype), make_integers(96, dtype=dtype, seed=1)
    kept = weight.clone(), bias.clone()
    shared = make_ops(dtype).pack_linear(weight, bias, None, allow_copy)
    alone = make_ops(dtype).pack_linear(weight.clone(), bias.clone(), None, allow_copy)
    gc.collect()
    junk = [torch.full_like(weight, math.nan) for _ in range(8)]  # takes memory that was freed
    for num_rows in (1, 16, 33):
        x = make_integers(num_rows, 64, dtype=dtype, seed=2)
        want = exact_linear(x, *kept).to(dtype)
        assert torch.equal(alone(x), want)
        assert torch.equal(shared(x), want)
    assert torch.equal(weight, kept[0])
    assert torch.equal(bias, kept[1])
    assert len(junk) == 8


# Operations between the matrix products


@SEVERAL_THREADS
@DTYPES
@pytest.mark.parametrize("num_rows", [0, 1, 5, 40])
@pytest.mark.parametrize("scale", [1.0, 6.9375])
def test_embed(num_rows: int, dtype: torch.dtype, scale: float) -> None:
    table = make(50, 33, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(50, (num_rows,), generator=generator, dtype=torch.int32)
    got, want = (ops.embed(token_ids, table, scale) for ops in (make_ops(dtype), torch_ops))
    assert torch.equal(got, want)


ROWS_AND_DIMS = pytest.mark.parametrize(
    ("num_rows", "dim"), [(0, 8), (1, 1), (1, 48), (2, 7), (3, 576), (16, 64), (33, 129)]
)


@SEVERAL_THREADS
@DTYPES
@ROWS_AND_DIMS
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_norm(num_rows: int, dim: int, scale: float, dtype: torch.dtype) -> None:
    x = scale * make(num_rows, dim, dtype=dtype)
    weights = NormWeights(make(dim, dtype=torch.float32, seed=1), EPS)
    before = x.clone()
    got, want = (ops.norm(ResidualStream(x), weights)[0] for ops in (make_ops(dtype), torch_ops))
    assert_as_rounded(got, want)
    assert torch.equal(x, before)


@SEVERAL_THREADS
@DTYPES
@ROWS_AND_DIMS
def test_norm_of_a_sum(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    x, residual = make(num_rows, dim, dtype=dtype), make(num_rows, dim, dtype=dtype, seed=2)
    weights = NormWeights(make(dim, dtype=torch.float32, seed=1), EPS)
    want, want_sum = torch_ops.norm(ResidualStream(residual.clone(), x.clone()), weights)
    got, got_sum = make_ops(dtype).norm(ResidualStream(residual.clone(), x.clone()), weights)
    assert torch.equal(got_sum, want_sum)
    assert_as_rounded(got, want)


@SEVERAL_THREADS
@DTYPES
@ROWS_AND_DIMS
def test_add_norm(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    x, residual = make(num_rows, dim, dtype=dtype), make(num_rows, dim, dtype=dtype, seed=2)
    weights = NormWeights(make(dim, dtype=torch.float32, seed=1), EPS)
    want = torch_ops.add_norm(residual.clone(), x.clone(), weights)
    got = make_ops(dtype).add_norm(residual.clone(), x.clone(), weights)
    assert_as_rounded(got, want, atol=4 * ROUNDING[dtype] * 4)


@SEVERAL_THREADS
@DTYPES
@ROWS_AND_DIMS
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_scale_logits(num_rows: int, dim: int, dtype: torch.dtype, softcap: float | None) -> None:
    logits = 8 * make(num_rows, dim, dtype=torch.float32)
    got = make_ops(dtype).scale_logits(logits.clone(), 0.7, softcap)
    want = 0.7 * logits.double()
    want = want if softcap is None else softcap * (want / softcap).tanh()
    assert_as_rounded(got, want.float(), atol=1e-5)


@SEVERAL_THREADS
@DTYPES
@ROWS_AND_DIMS
@ACTIVATIONS
def test_gate(num_rows: int, dim: int, dtype: torch.dtype, activation: Activation) -> None:
    gate_up = 4 * make(num_rows, 2 * dim, dtype=dtype)
    got, want = (ops.act_and_mul(gate_up, activation) for ops in (make_ops(dtype), torch_ops))
    assert_gated(got, want, gate_up, activation)


@DTYPES
@ACTIVATIONS
def test_gate_of_any_size_of_number(dtype: torch.dtype, activation: Activation) -> None:
    """Results equal torch's and are never NaN, from the smallest to the largest values."""
    sizes = torch.logspace(-38, 38, 305, dtype=torch.float64).tolist()
    gates = torch.tensor([0.0, *sizes, *(-size for size in sizes)]).to(dtype)
    gates = torch.cat((gates, torch.linspace(-110, 110, 881).to(dtype)))
    for up in (1.0, -2.0, 1e-30, 1e30, 3e38):
        gate_up = torch.cat((gates, torch.full_like(gates, up)))[None]
        got, want = (ops.act_and_mul(gate_up, activation) for ops in (make_ops(dtype), torch_ops))
        assert not got.isnan().any()
        is_tiny = want.abs() < abs(up) * 1e-34  # silu below -84 may underflow early
        kept = torch.cat((gates[None][~is_tiny], torch.full_like(gates, up)[None][~is_tiny]))
        assert_gated(got[~is_tiny][None], want[~is_tiny][None], kept[None], activation)
        limit = 1e-34 if activation == "silu" else 1e-6  # torch's gelu underflows below -5.4
        assert bool((got[is_tiny].abs() <= abs(up) * limit).all())


def assert_gated(got: Tensor, want: Tensor, gate_up: Tensor, activation: Activation) -> None:
    """Allow errors relative to gate * up: torch computes GELU from a difference to 1."""
    if activation == "silu":
        assert_as_rounded(got, want)
        return
    gate, up = gate_up.double().chunk(2, dim=-1)
    error = (got.double() - want.double()).abs()
    rounding = 2e-6 if got.dtype == torch.float32 else 4 * ROUNDING[torch.bfloat16]
    is_large = want.isinf()
    assert torch.equal(got[is_large], want[is_large])
    limit = rounding * want.double().abs() + 2e-7 * (gate * up).abs() + 1e-37
    assert bool((error <= limit)[~is_large].all())


@DTYPES
def test_gate_lets_nan_and_infinity_through(dtype: torch.dtype) -> None:
    gates = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 1.0, 0.0, -1e4]).to(dtype)
    ups = torch.tensor([1.0, 1.0, 1.0, math.nan, math.inf, math.inf, -math.inf]).to(dtype)
    gate_up = torch.cat((gates, ups))[None]
    got, want = (ops.act_and_mul(gate_up, "silu") for ops in (make_ops(dtype), torch_ops))
    torch.testing.assert_close(got, want, equal_nan=True, rtol=2.0**-7, atol=0)


@SEVERAL_THREADS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (7, 5), (65, 255)], ids=str)
def test_multiply_sigmoid(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The gate is part of a wider tensor, or has one column; it may be added to another tensor."""
    x, base = (make(*shape, dtype=dtype, seed=seed) for seed in range(2))
    gates = 30 * make(shape[0], shape[1] + 3, dtype=dtype, seed=2)
    for gate in (gates[:, 1:-2], gates[:, 3:4]):
        for added in (None, base):
            ops = make_ops(dtype), torch_ops
            got, want = (each.multiply_sigmoid(x.clone(), gate, added) for each in ops)
            assert_as_rounded(got, want, atol=2e-6)


HEADS = pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 1, 2), (1, 9, 3, 64), (3, 4, 2, 16), (5, 6, 2, 24), (17, 4, 4, 80), (40, 8, 1, 128)],
)


@SEVERAL_THREADS
@DTYPES
@HEADS
@pytest.mark.parametrize("normed", ["nothing", "heads", "all heads"])
def test_rope_write(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    normed: str,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(1)
    # The tokens are apart, as they are behind the gates of an attention output.
    qkv = make(num_tokens, 1 + num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    whole = qkv.clone()
    qkv = qkv[:, 1:]
    q_weight, k_weight = make(2, head_dim, dtype=torch.float32, seed=2)
    if normed == "all heads":
        q_weight = make(num_heads, head_dim, dtype=torch.float32, seed=2)
        k_weight = make(num_kv_heads, head_dim, dtype=torch.float32, seed=3)
    norm = None
    if normed != "nothing":
        norm = QKNormWeights(q_weight, k_weight, EPS, is_over_all_heads=normed == "all heads")
    # In one of the cases, q has its own cosines and sines.
    config = RopeConfig(10000.0, q_scaling=float(num_tokens == 5), original_max_position=8)
    rope = rope_table(head_dim, 100, config, torch.device("cpu"))
    positions = torch.randint(100, (num_tokens,), generator=generator)
    slot_mapping = torch.randperm(6 * 16, generator=generator)[:num_tokens]
    results = []
    for ops in (make_ops(dtype), torch_ops):
        turned = whole.clone()[:, 1:]
        caches = [torch.full((6, 16, num_kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)]
        ops.rope_write(turned, norm, rope, positions, LayerCache(*caches), slot_mapping)
        results.append(turned)
        for cached, heads in zip(caches, turned[:, num_heads:].chunk(2, dim=1), strict=True):
            lines = cached.view(-1, num_kv_heads, head_dim)
            assert torch.equal(lines[slot_mapping], heads)
            lines[slot_mapping] = 7.0
            assert bool((cached == 7.0).all())  # only its slots were written
    got, want = results
    assert torch.equal(got[:, -num_kv_heads:], qkv[:, -num_kv_heads:])
    # A rotation may cancel most of a pair; what remains has the rounding error of the whole pair.
    # Before the rotation, only the norm rounds to bf16.
    rounding = ROUNDING[torch.float32 if norm is None else dtype]
    assert_as_rounded(got, want, atol=4 * rounding * want.abs().max().item())


@SEVERAL_THREADS
@DTYPES
@pytest.mark.parametrize("head_dim", [2, 24, 64, 136])
def test_rope_write_in_eight_bits(head_dim: int, dtype: torch.dtype) -> None:
    """Write the same FP8 values and exponents as the reference, bit for bit, and nothing else."""
    generator, num_kv_heads = torch.Generator().manual_seed(1), 3
    qkv = make(40, 2 + 2 * num_kv_heads, head_dim, dtype=dtype)
    qkv *= torch.linspace(-60, 60, 40).exp2()[:, None, None].to(dtype)
    info = torch.finfo(dtype)
    for row, value in enumerate((0.0, info.max, info.tiny, math.nan, math.inf, -info.max)):
        qkv[row, :, 1] = value
    rope = torch.tensor([1.0, 0.0]).repeat_interleave(head_dim // 2).view(1, 2, -1)
    slot_mapping = torch.randperm(6 * 16, generator=generator)[: len(qkv)]
    results = []
    for ops in (make_ops(dtype), torch_ops):
        codes = torch.full((2, 6, 16, num_kv_heads, head_dim), 7, dtype=torch.uint8)
        exponents = torch.full((2, 6, num_kv_heads, 16), 7, dtype=torch.uint8)
        layer = LayerCache(*codes.view(FP8), *exponents)
        positions = torch.zeros(len(qkv), dtype=torch.int64)
        ops.rope_write(qkv.clone(), None, rope, positions, layer, slot_mapping)
        results.append((codes, exponents))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@SEVERAL_THREADS
@DTYPES
@pytest.mark.parametrize(
    ("key_heads", "group", "key_dim", "value_dim", "conv_size"),
    [(1, 1, 2, 1, 2), (3, 2, 12, 8, 4), (2, 3, 72, 136, 3), (4, 2, 128, 128, 4)],
)
@pytest.mark.parametrize("counts", [None, [1, 9, 1, 1, 30]], ids=str)
def test_gated_delta_net(
    key_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    conv_size: int,
    counts: list[int] | None,
    dtype: torch.dtype,
) -> None:
    heads, is_tiled = key_heads * group, counts is not None
    sizes = RecurrentConfig(frozenset(), key_heads, heads, key_dim, value_dim, conv_size, is_tiled)
    rows = RecurrentRows(torch.tensor([4, 0, 6, 2, 1]), counts)
    inputs, weights = random_inputs(sizes, sum(counts or [1] * 5), dtype)
    results = []
    for ops in (make_ops(dtype), torch_ops):
        state = random_state(sizes, 7, dtype)
        y = ops.gated_delta_net(inputs, weights, state, rows)
        results.append((y, state.recurrent, state.conv))
    (got, *got_states), (want, *want_states) = results
    assert_as_rounded(got, want, atol=4e-6 * want.float().abs().max().item())
    for a, b in zip(got_states, want_states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def assert_as_rounded(got: Tensor, want: Tensor, atol: float = 1e-40) -> None:
    """Allow for two intermediate roundings that may differ."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    rtol = {torch.float32: 2e-6, torch.bfloat16: 4 * ROUNDING[torch.bfloat16]}[want.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# Rows are independent

RowOp = Callable[[NumbaOps, Tensor], Tensor]


def norm_rows(ops: NumbaOps, x: Tensor) -> Tensor:
    return ops.norm(ResidualStream(x), NormWeights(torch.ones(x.shape[1]), EPS))[0]


def add_norm_rows(ops: NumbaOps, x: Tensor) -> Tensor:
    norm = NormWeights(torch.ones(x.shape[1]), EPS)
    y, residual = ops.norm(ResidualStream(x.clone(), x.clone()), norm)
    return torch.cat((y, residual), dim=1)


def gate_rows(ops: NumbaOps, x: Tensor) -> Tensor:
    return ops.act_and_mul(x, "silu")


def linear_rows(ops: NumbaOps, x: Tensor) -> Tensor:
    return ops.pack_linear(make(37, x.shape[1], dtype=x.dtype, seed=1), None, None, True)(x)


@DTYPES
@pytest.mark.parametrize("run", [norm_rows, add_norm_rows, gate_rows, linear_rows])
# Products with more rows run in oneDNN, whose bf16 kernels (also F.linear's) multiply data past the
# end of a row by 0 unless rows are multiples of 64 bytes; model sizes are.
@pytest.mark.parametrize(("num_rows", "dim"), [(2, 70), (4, 70), (7, 70), (16, 70), (40, 96)])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_broken_row_changes_no_other(
    run: RowOp, num_rows: int, dim: int, value: float, dtype: torch.dtype
) -> None:
    x = make(num_rows, dim, dtype=dtype)
    want = run(make_ops(dtype), x)
    for broken in range(num_rows):
        damaged = x.clone()
        damaged[broken] = value
        got = run(make_ops(dtype), damaged)
        others = [row for row in range(num_rows) if row != broken]
        assert torch.equal(got[others], want[others])
        assert not got[broken].isfinite().all()


@DTYPES
def test_a_broken_token_changes_no_other_in_the_cache(dtype: torch.dtype) -> None:
    rope = rope_table(16, 8, RopeConfig(10000.0), torch.device("cpu"))
    positions, slot_mapping = torch.arange(4), torch.tensor([3, 9, 1, 7])
    caches = []
    for value in (0.0, math.nan):
        qkv = make(4, 6, 16, dtype=dtype)
        qkv[2] = value
        cache = torch.zeros(2, 1, 16, 2, 16, dtype=dtype)
        make_ops(dtype).rope_write(qkv, None, rope, positions, LayerCache(*cache), slot_mapping)
        caches.append(cache)
    others = [slot for slot in range(16) if slot != 1]
    assert torch.equal(caches[0][:, :, others], caches[1][:, :, others])


def test_products_do_not_depend_on_the_row_they_stand_in() -> None:
    """A row alone, in a tile of four, or left over from a tile gives the same bits."""
    weight, x = make(64, 96, dtype=torch.float32), make(1, 96, dtype=torch.float32, seed=1)
    linear: PackedLinear = make_ops(torch.float32).pack_linear(weight, None, None, True)
    alone = linear(x)
    for num_rows in range(2, MAX_LINEAR_ROWS[torch.float32] + 1):
        assert torch.equal(linear(x.expand(num_rows, -1)), alone.expand(num_rows, -1))
