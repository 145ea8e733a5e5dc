"""Plans as bytes: what arrives equals what was sent, and lies where it arrived."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np

from benchmarks.engine.plan_broadcast import decode_rows, long_prompts
from nanovllm.engine.step import BlockCopy, BlockUpdate, NewRow, StepPlan
from nanovllm.executor.codec import decode_plan, encode_plan
from nanovllm.sampling_params import SamplingParams


def round_trip(plan: StepPlan) -> StepPlan:
    return decode_plan(bytearray(b"".join(encode_plan(plan))))


def assert_equal(plan: StepPlan, other: StepPlan) -> None:
    for field in fields(StepPlan):
        mine, theirs = getattr(plan, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype
            assert mine.tolist() == theirs.tolist()
        elif field.name == "new_rows":
            assert list(map(as_tuple, mine)) == list(map(as_tuple, theirs))
        else:
            assert mine == theirs


def as_tuple(row: NewRow) -> tuple[object, ...]:
    assert row.token_ids.dtype == np.int32
    values = {field.name: getattr(row, field.name) for field in fields(NewRow)}
    return tuple({**values, "token_ids": row.token_ids.tolist()}.values())


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.randint(1, 10**6)
    return SamplingParams(
        temperature=rng.choice([0, 1, rng.random() * 100]),
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.5,
        top_k=rng.choice([-1, 0, 1, 2**40]),
        top_p=rng.choice([1, 1e-300, 1 - rng.random()]),
        min_p=rng.random(),
        seed=rng.choice([None, -(2**63), 2**64 - 1, rng.getrandbits(64)]),
        stop=rng.choice(["", 'é\n"\\', "\ud800", ["a", "终"]]) or (),
        stop_token_ids=rng.sample(range(10**6), rng.randint(0, 3)),
        min_tokens=rng.randint(0, max_tokens),
        skip_special_tokens=rng.random() < 0.5,
    )


def random_new_row(rng: random.Random) -> NewRow:
    return NewRow(
        slot=rng.randrange(512),
        token_ids=np.array(rng.choices(range(2**31), k=rng.randint(1, 90)), np.int32),
        block_ids=rng.sample(range(10**6), rng.randint(0, 9)),
        num_prompt_tokens=rng.randint(1, 90),
        params=random_params(rng),
        seed=rng.choice([-(2**63), 2**63 - 1, rng.getrandbits(63)]),
        stop_token_ids=frozenset(rng.sample(range(10**6), rng.randint(0, 4))),
        pooling=rng.choice([None, "last", "mean"]),
    )


def random_plan(rng: random.Random) -> StepPlan:
    num_rows = rng.choice([0, 1, 7, 300])
    slots, starts, counts, num_logits = (
        np.array(rng.choices(range(2**31), k=num_rows), np.int32) for _ in range(4)
    )
    return StepPlan(
        slots=slots,
        starts=starts,
        counts=counts,
        num_logits=num_logits,
        new_rows=[random_new_row(rng) for _ in range(rng.choice([0, 0, 1, 5]))],
        block_updates=[
            BlockUpdate(*rng.choices(range(2**31), k=3)) for _ in range(rng.choice([0, 1, 40]))
        ],
        released=rng.sample(range(512), rng.choice([0, 1, 20])),
        num_decode_tokens=rng.randrange(512),
        block_copies=[
            BlockCopy(*rng.choices(range(2**31), k=2)) for _ in range(rng.choice([0, 1, 9]))
        ],
    )


def test_any_plan_survives() -> None:
    rng = random.Random(0)
    for _ in range(300):
        plan = random_plan(rng)
        assert_equal(plan, round_trip(plan))


def test_plans_of_many_rows_and_of_many_tokens_survive() -> None:
    for plan in (decode_rows(256), long_prompts(64, 30_000)):
        assert_equal(plan, round_trip(plan))


def test_a_decode_row_costs_a_few_bytes() -> None:
    """`benchmarks/engine/plan_broadcast.py` times the way of a plan; this is what bounds it."""
    messages = [b"".join(encode_plan(decode_rows(count))) for count in (256, 512)]
    assert len(messages[0]) < 5000
    assert len(messages[1]) - len(messages[0]) < 256 * 20


def test_arrays_are_aligned_views_that_may_be_written() -> None:
    rng = random.Random(0)
    plan = replace(random_plan(rng), new_rows=[random_new_row(rng) for _ in range(9)])
    message = bytearray(b"".join(encode_plan(plan)))
    decoded = decode_plan(message)
    space = np.frombuffer(message, np.uint8)
    columns = [decoded.slots, decoded.starts, decoded.counts, decoded.num_logits]
    for array in columns:
        assert np.shares_memory(array, space)
    for array in [*columns, *(row.token_ids for row in decoded.new_rows)]:
        assert array.flags.aligned
        assert array.flags.writeable
