"""Day 5: shared blocks and preemption change the work, not the output."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import day5 as solutions
import pytest

import day5_prefix_cache as day5
from common import Model
from day3_paged_cache import PagedCache, Sequence
from day4_continuous_batching import Engine
from tests.checkpoints import VOCAB_SIZE, TinyCheckpoint

BLOCK_SIZE, MAX_TOKENS = 4, 9
PREFIXES = [random.Random(seed).choices(range(VOCAB_SIZE), k=18) for seed in range(2)]
# Every second prompt begins alike, and the last one equals the first.
PROMPTS = [[*PREFIXES[i % 2], *range(i, i + 2 + i % 3)] for i in range(6)]
PROMPTS.append(PROMPTS[0])


def make_engine(
    model: Model,
    num_blocks: int,
    num_seqs: int,
    num_tokens: int,
    blocks_class: type[day5.BlockManager] = day5.BlockManager,
    scheduler_class: type[day5.Scheduler] = day5.Scheduler,
) -> Engine:
    blocks = blocks_class(num_blocks, BLOCK_SIZE)
    cache = PagedCache(model.config, num_blocks, BLOCK_SIZE)
    scheduler = scheduler_class(blocks, model.config.eos_ids, num_seqs, num_tokens)
    return Engine(model, cache, scheduler)


def check(blocks: day5.BlockManager, running: list[Sequence]) -> None:
    """Recompute what the block manager keeps."""
    held = Counter(block_id for seq in running for block_id in seq.block_table)
    assert blocks.ref_counts == [held[i] for i in range(len(blocks.ref_counts))]
    assert set(blocks.free_ids) == {i for i, count in enumerate(blocks.ref_counts) if count == 0}
    assert all(blocks.hashes[i] == block_hash for block_hash, i in blocks.cached.items())


@pytest.mark.parametrize(
    ("num_blocks", "num_seqs", "num_tokens"), [(11, 3, 64), (13, 4, 7), (17, 7, 24), (80, 7, 200)]
)
def test_equals_transformers(
    num_blocks: int,
    num_seqs: int,
    num_tokens: int,
    tiny: Callable[[str], TinyCheckpoint],
    tiny_llama: Model,
) -> None:
    engine = make_engine(tiny_llama, num_blocks, num_seqs, num_tokens)
    sequences = [Sequence(str(i), list(ids), MAX_TOKENS) for i, ids in enumerate(PROMPTS)]
    scheduler = engine.scheduler
    scheduler.waiting.extend(sequences)
    while scheduler.waiting or scheduler.running:
        engine.step()
        check(scheduler.blocks, scheduler.running)
    assert [seq.output_ids for seq in sequences] == tiny("llama").answers(PROMPTS, MAX_TOKENS)
    num_preempted = sum(event.endswith("preempted") for event in scheduler.events)
    assert (num_preempted > 0) == (num_blocks < 80)


def test_a_hash_covers_everything_before() -> None:
    blocks = day5.BlockManager(8, BLOCK_SIZE)
    first, second = Sequence("A", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1), Sequence("B", [*range(9)], 1)
    second.token_ids[4:8] = first.token_ids[4:8]
    hashes = [list(blocks.block_hashes(seq, 2)) for seq in (first, second)]
    assert len({block_hash for pair in hashes for block_hash in pair}) == 4


def test_a_block_stays_cached_until_it_is_reused() -> None:
    blocks = day5.BlockManager(5, BLOCK_SIZE)

    def run(token_ids: list[int]) -> int:
        """Return how many tokens were cached."""
        seq = Sequence("A", list(token_ids), 1)
        assert blocks.admit(seq)
        num_cached, seq.num_computed = seq.num_computed, len(token_ids)
        blocks.register(seq)
        blocks.release(seq)
        check(blocks, [])
        return num_cached

    old, new = list(range(12)), list(range(50, 55))
    assert [run(old), run(old)] == [0, 8]  # the last block has to run, for the next token
    assert [run([*old, 7]), run(new)] == [12, 0]  # this uses the two blocks that were never full
    assert run([*old, 7]) == 12
    assert run(list(range(90, 99))) == 0  # needs three blocks, hence two of the cached ones
    # The block of `new` and the end of `old` are gone, but not the beginning of `old`.
    assert [run(old), run(new)] == [8, 0]


def test_a_sequence_that_does_not_fit_changes_nothing() -> None:
    blocks = day5.BlockManager(3, BLOCK_SIZE)
    seq = Sequence("A", list(range(8)), 1)
    assert blocks.admit(seq)
    seq.num_computed = 8
    blocks.register(seq)
    other = Sequence("B", list(range(20)), 1)
    assert not blocks.admit(other)
    assert (other.block_table, other.num_computed) == ([], 0)
    check(blocks, [seq])


def test_the_program(
    smollm2: tuple[Model, Any], assert_greedy: Callable[..., None], run_program: Callable[..., str]
) -> None:
    _, tokenizer = smollm2
    printed = run_program(day5)
    for line in (
        "     2  333AABBCC..          12  B enters, 12 of 17 tokens cached; C enters, 12 of",
        "     7  222AABB--AB           2  C is preempted",
        "    10  222-CBBCBCB           6  C enters, 16 of 21 tokens cached",
        "    12  222DC--CDC-           2  D enters, 16 of 17 tokens cached",
        "    5      11     15          60",
        "    4      21     14          96",
    ):
        assert f"\n{line}" in printed
    # The preempted sequence; the program has compared all of them with day 4.
    [text] = [line for line in printed.splitlines() if line.startswith("  C: ")]
    output = " Cairo, Egypt - Cairo, Egypt - Cairo,"
    prompt = day5.REQUESTS["C"][0]
    assert text == f"  C: {prompt + output!r}"
    assert_greedy(tokenizer.encode(prompt), tokenizer.encode(output))


def test_exercise_1_salt(tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model) -> None:
    engine = make_engine(tiny_llama, 40, 1, 64, blocks_class=solutions.SaltedBlockManager)
    prompt = PROMPTS[0]
    sequences = [
        solutions.SaltedSequence(name, list(prompt), MAX_TOKENS, salt=salt)
        for name, salt in zip("ABCD", ("", "mine", "", "mine"), strict=True)
    ]
    engine.run(sequences)
    entered = [event for event in engine.scheduler.events if "enters" in event]
    assert [event.split()[2] for event in entered] == ["0", "0", "16", "16"]
    right = tiny("llama").generate(prompt, MAX_TOKENS)
    assert [seq.output_ids for seq in sequences] == [right] * 4


def test_exercise_2_early(tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model) -> None:
    engine = make_engine(tiny_llama, 40, 7, 200, scheduler_class=solutions.EarlyScheduler)
    sequences = [Sequence(str(i), list(ids), MAX_TOKENS) for i, ids in enumerate(PROMPTS)]
    first, *_ = engine.run(sequences)
    assert len(first) == len(PROMPTS)
    assert [row.start for row in first] == [0, 0, 16, 16, 16, 16, 16]
    assert [seq.output_ids for seq in sequences] == tiny("llama").answers(PROMPTS, MAX_TOKENS)
