"""The persistent step equals plain torch, for the shapes and variants that it supports."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.devices import NEEDS_GPU

pytestmark = NEEDS_GPU

# hidden, heads, KV heads, head_dim, mlp, vocab
SHAPES = {
    "qwen3-0.6b": (1024, 16, 8, 128, 3072, 151936),
    "llama-3.2-1b": (2048, 32, 8, 64, 8192, 128256),
    "qwen3-4b": (2560, 32, 8, 128, 9728, 5000),
    "qwen3-8b": (4096, 32, 8, 128, 12288, 5000),
    "qwen3-14b": (5120, 40, 8, 128, 17408, 5000),
    "qwen2.5-0.5b": (896, 14, 2, 64, 4864, 5001),
    "qwen2.5-7b": (3584, 28, 4, 128, 18944, 5000),
    "llama-3.1-8b": (4096, 32, 8, 128, 14336, 5000),
    "smollm2-135m": (576, 9, 3, 64, 1536, 5000),
    "tiny": (256, 4, 2, 128, 512, 1000),
}

# (num_experts, top_k, size, is_normalized), then the sizes as above
EXPERTS = {
    "qwen3-30b-a3b": ((128, 8, 768, True), (2048, 32, 4, 128, 6144, 5000)),
    "few": ((6, 2, 256, False), (256, 4, 2, 128, 512, 1000)),
    "resident": ((6, 2, 1280, True), (256, 4, 2, 128, 2560, 1000)),  # register-resident gate and up
}


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    from nanovllm.devices.cuda.persistent.sizes import StepShape

    return StepShape(*SHAPES[request.param])


def test_equals_the_reference(shape) -> None:  # type: ignore[no-untyped-def]
    """Run growing contexts: each step continues with the buffers that the previous one left."""
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    has_bias = shape.hidden in (896, 3584)
    step = RandomStep(shape, Variant(has_qk_norm=not has_bias, has_bias=has_bias), 3000)
    for context in (1, 2, 31, 32, 33, 400, 513, 514, 1025, 2900):
        check(step.errors([1], {1: context}), context)


def check(errors: tuple[float, float, float], case: object, is_fp8: bool = False) -> None:
    """With an FP8 cache, any difference may round a new key or value to another FP8 value."""
    kernel, plain, cache = errors
    assert kernel < (2 if is_fp8 else 1.3) * plain + 1e-4, case
    assert cache < (0.05 if is_fp8 else 0.01), case


# name, bits, rows
SEVERAL_ROWS = [
    *(("qwen3-0.6b", 16, rows) for rows in (2, 8)),
    *(("llama-3.2-1b", bits, 4) for bits in (16, 4)),
    *[("qwen3-8b", 16, 8), ("qwen3-8b", 8, 2), ("qwen3-8b", 4, 4)],
    *[("qwen2.5-7b", 16, 4), ("qwen2.5-7b", 4, 2)],
    *[("tiny", 16, 8), ("tiny", 8, 4), ("tiny", 4, 2), ("tiny", 4, 4)],
]
SEVERAL_ROWS_FP8 = [
    *(("qwen3-0.6b", 16, rows) for rows in (1, 2, 4, 8)),
    *(("llama-3.2-1b", bits, rows) for bits in (16, 8) for rows in (1, 4)),
    *[("qwen3-8b", 8, 1), ("qwen3-8b", 8, 4), ("qwen2.5-7b", 16, 4), ("qwen2.5-0.5b", 16, 8)],
    *[("tiny", 16, 8), ("tiny", 8, 4), ("tiny", 4, 2)],
]


@pytest.mark.parametrize(
    ("name", "bits", "rows", "cache_bits"),
    [(*case, 16) for case in SEVERAL_ROWS] + [(*case, 8) for case in SEVERAL_ROWS_FP8],
)
def test_several_rows(name: str, bits: int, rows: int, cache_bits: int) -> None:
    """Covers separate sequences of any lengths, padding, and consecutive tokens of a sequence."""
    from nanovllm.devices.cuda.persistent.sizes import StepShape
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    shape, is_fp8 = StepShape(*SHAPES[name], bits, cache_bits=cache_bits), cache_bits == 8
    assert rows in shape.rows
    has_bias = shape.hidden in (896, 3584)
    step = RandomStep(shape, Variant(has_qk_norm=not has_bias, has_bias=has_bias), 1300, 8)
    lengths = dict(enumerate((1, 1300, 33, 400, 65, 64, 1025, 7), start=1))
    separate = [[slot] for slot in lengths] + [[2, 3], [1, 4, 0, 6]]
    for slots in (*separate, [8, 7, 6, 0, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8]):
        if len(slots) == rows:
            check(step.errors(slots, lengths), slots, is_fp8)
    for slots in ([4, 4], [4, 4, 4, 0], [3, 3, 3, 3], [4] * 8, [7, 7, 7, 5, 5, 5, 5, 0]):
        if len(slots) == rows:
            check(step.errors(slots, lengths, verifies=True), slots, is_fp8)


@pytest.mark.parametrize(
    ("name", "bits", "cache_bits"),
    [
        *(("qwen3-0.6b", bits, 16) for bits in (16, 8, 4)),
        *[("qwen3-8b", 16, 16), ("tiny", 16, 16)],
        *[("qwen3-0.6b", 16, 8), ("qwen3-0.6b", 8, 8), ("llama-3.2-1b", 16, 8), ("tiny", 16, 8)],
    ],
)
def test_bits_do_not_depend_on_other_rows(name: str, bits: int, cache_bits: int) -> None:
    from nanovllm.devices.cuda.persistent.sizes import StepShape
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    shape = StepShape(*SHAPES[name], bits, cache_bits=cache_bits)
    step = RandomStep(shape, Variant(3), 1300, 8)
    lengths = dict(enumerate((1, 1300, 33, 400, 65, 64, 1025, 7), start=1))
    alone = {slot: step.run_rows([slot], lengths)[0] for slot in lengths}
    sizes = step.shape.rows
    for slots in ([2, 3], [8, 1, 4, 7], [6, 0, 2, 0], [1, 2, 3, 4, 5, 6, 7, 8][: sizes[-1]]):
        found = step.run_rows(slots, lengths)
        assert all(torch.equal(found[i], alone[slot]) for i, slot in enumerate(slots) if slot)
    # Eight tokens one at a time, and several at a time.
    one_by_one = [step.run_rows([4], {4: length})[0] for length in range(397, 405)]
    for count in range(1, sizes[-1] + 1):
        rows = next(rows for rows in sizes if rows >= count)
        for last in range(count, 9, count):
            # Previous contents of the cache do not matter.
            step.overwrite_cache(step.table[4, 6], 12 + last - count)
            slots = [4] * count + [0] * (rows - count)
            found = step.run_rows(slots, {4: 396 + last}, verifies=True)
            for i in range(count):
                assert torch.equal(found[i], one_by_one[last - count + i]), (count, last, i)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "tiny"])
def test_quantized_weights(name: str, bits: int) -> None:
    from nanovllm.devices.cuda.persistent.sizes import StepShape
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    step = RandomStep(StepShape(*SHAPES[name], bits), Variant(), 700)
    for context in (1, 33, 514, 650):
        check(step.errors([1], {1: context}), context)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", list(EXPERTS))
def test_experts(name: str, bits: int) -> None:
    """Compare medians over some tokens: a near tie between experts may be decided either way."""
    from nanovllm.devices.cuda.persistent.sizes import ExpertsShape, StepShape
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    experts, sizes = EXPERTS[name]
    shape = StepShape(*sizes, bits, ExpertsShape(*experts))
    assert shape.rows == (1,)
    num_layers = 3 if name == "few" else 1
    step = RandomStep(shape, Variant(num_layers), 700)
    errors = [step.errors([1], {1: context}) for context in (1, 33, 100, 514, 650)]
    kernels, plains, caches = zip(*errors, strict=True)
    assert statistics.median(kernels) < 1.3 * statistics.median(plains) + 1e-4
    # The first layer's keys do not depend on the choice of experts.
    assert (max(caches) if num_layers == 1 else statistics.median(caches)) < 0.01


@pytest.mark.parametrize(("rows", "cache_bits"), [(1, 16), (4, 16), (1, 8), (4, 8)])
@pytest.mark.parametrize(
    "change",
    [
        {"window": 100},
        {"block_size": 32},
        {"block_size": 256},
        {"num_layers": 1},
        {"has_qk_norm": False},
        {"has_bias": True},
    ],
    ids=str,
)
def test_variants(change: dict[str, object], rows: int, cache_bits: int) -> None:
    from nanovllm.devices.cuda.persistent.sizes import StepShape
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    shape = StepShape(*SHAPES["tiny"], cache_bits=cache_bits)
    step = RandomStep(shape, replace(Variant(), **change), 700, 4)
    for context in (1, 99, 100, 101, 650):
        lengths = dict(enumerate((context, 1 + context // 2, 100, 333), start=1))
        check(step.errors([1, 2, 3, 4][:rows], lengths), context, cache_bits == 8)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b"])
def test_new_rows_are_those_of_separate_kernels(name: str) -> None:
    """The kernel that writes an FP8 cache in other steps gets the same q, k and v."""
    from nanovllm.devices.cuda.kernels.elementwise import rope_write
    from nanovllm.devices.cuda.persistent.sizes import StepShape
    from nanovllm.ops.interface import LayerCache
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    shape = StepShape(*SHAPES[name], cache_bits=8)
    step = RandomStep(shape, Variant(1, has_qk_norm=False), 700, 8)
    lengths = dict(enumerate((1, 64, 65, 130, 257, 400, 513, 690), start=1))
    (cache,) = step.caches
    other = LayerCache(*(part.clone() for part in cache.parts))
    step.run_rows(list(lengths), lengths)
    qkv = step.step._exchanges[8][1][0, 0, :, : shape.qkv].view(torch.bfloat16)
    assert qkv.isfinite().all()
    slots = torch.stack([step.slot_mapping(slot, length)[-1] for slot, length in lengths.items()])
    positions = torch.tensor(list(lengths.values()), device="cuda") - 1
    heads = qkv.reshape(8, -1, shape.head_dim).clone()
    rope_write(heads, None, step.tensors.rope, positions, other, slots)
    k, v, k_exponents, v_exponents = zip(cache.parts, other.parts, strict=True)
    assert torch.equal(*v)
    assert torch.equal(*v_exponents)
    # The compiler may contract other products of RoPE.
    assert torch.equal(*k_exponents)
    assert (k[0] != k[1]).sum() < 0.01 * len(lengths) * shape.num_kv_heads * shape.head_dim


@pytest.mark.parametrize("length", [0, 250], ids=["padding", "250"])
@pytest.mark.parametrize(
    ("name", "bits", "rows", "cache_bits"),
    [(name, bits, 1, 16) for name in ("tiny", "few") for bits in (16, 4)]
    + [("smollm2-135m", 16, 1, 16), ("qwen2.5-0.5b", 16, 1, 16)]
    + [("tiny", 16, 8, 16), ("tiny", 8, 4, 16), ("tiny", 4, 4, 16)]
    + [("tiny", 16, 2, 16), ("qwen2.5-0.5b", 16, 4, 16)]
    + [("tiny", 8, 1, 8), ("tiny", 16, 8, 8), ("few", 16, 1, 8), ("qwen2.5-0.5b", 16, 4, 8)],
)
def test_many_steps_in_a_graph_are_alike(
    name: str, bits: int, rows: int, cache_bits: int, length: int
) -> None:
    """CTAs that run ahead or fall behind must not read a value of another step or layer.

    CTAs of a narrow model, or without keys, wait the least for others.
    """
    from nanovllm.devices.cuda.persistent.sizes import ExpertsShape, StepShape
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    experts, sizes = EXPERTS[name] if name in EXPERTS else ((), SHAPES[name])
    shape = StepShape(*sizes, bits, ExpertsShape(*experts), cache_bits)
    step = RandomStep(shape, Variant(num_layers=3), 300, rows)
    for slot in range(rows + 1):
        step.lengths[slot] = max(length - 29 * slot, 0)
    step.use(list(range(1, rows + 1)), verifies=False)
    wanted = step.run().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            step.run()
    for _ in range(40):
        step.logits.zero_()
        graph.replay()
        assert torch.equal(step.logits[:rows].view(torch.int32), wanted.view(torch.int32))
    assert not step.step.gave_up()


@pytest.mark.parametrize("cache_bits", [16, 8])
def test_padding_writes_no_key(cache_bits: int) -> None:
    from nanovllm.devices.cuda.persistent.sizes import StepShape
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    step = RandomStep(StepShape(*SHAPES["tiny"], cache_bits=cache_bits), Variant(), 300)
    before = [part.clone() for part in step.cache_parts]
    for slots in ([0], [0, 0, 0, 0]):
        step.use(slots)
        step.run()
    torch.cuda.synchronize()
    assert all(map(torch.equal, before, step.cache_parts))
    check(step.errors([1], {1: 77}), "after padding", cache_bits == 8)


def test_gives_up_instead_of_hanging() -> None:
    from nanovllm.devices.cuda.persistent.sizes import StepShape
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    step = RandomStep(StepShape(*SHAPES["tiny"]), Variant(), 300)
    step.lengths.fill_(10)
    attended = step.step._exchanges[1][3]
    attended[..., -1] = -1  # EMPTY: a value that no CTA will store
    step.run()
    torch.cuda.synchronize()
    assert step.step.gave_up()
    assert not step.step.gave_up()  # the flag was reset
