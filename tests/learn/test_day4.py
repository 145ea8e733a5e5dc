"""Day 4: the scheduler changes the steps, not the output."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import day4 as solutions
import pytest

import day4_continuous_batching as day4
from common import Model
from day3_paged_cache import BlockManager, PagedCache, Sequence
from tests.checkpoints import VOCAB_SIZE, TinyCheckpoint

NUM_BLOCKS, BLOCK_SIZE, MAX_TOKENS = 24, 4, 8
PROMPTS = [
    random.Random(seed).choices(range(VOCAB_SIZE), k=length)
    for seed, length in enumerate((3, 17, 1, 30, 8, 12))
]


def make_engine(
    model: Model, scheduler: Callable[..., day4.Scheduler], num_seqs: int, num_tokens: int
) -> day4.Engine:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    cache = PagedCache(model.config, NUM_BLOCKS, BLOCK_SIZE)
    return day4.Engine(model, cache, scheduler(blocks, model.config.eos_ids, num_seqs, num_tokens))


def new_sequences(prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
    return [Sequence(str(i), list(ids), MAX_TOKENS) for i, ids in enumerate(prompts)]


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(1, 64), (3, 7), (6, 1), (4, 40)])
def test_equals_transformers(
    num_seqs: int, num_tokens: int, tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    engine = make_engine(tiny_llama, day4.Scheduler, num_seqs, num_tokens)
    sequences = new_sequences()
    steps = engine.run(sequences)
    assert [seq.output_ids for seq in sequences] == tiny("llama").answers(PROMPTS, MAX_TOKENS)
    assert len(engine.scheduler.blocks.free_ids) == NUM_BLOCKS
    for rows in steps:
        assert 1 <= len(rows) <= num_seqs
        assert sum(row.num_tokens for row in rows) <= num_tokens
    # Every token ran exactly once, in order, except the last, which nothing follows.
    for seq in sequences:
        ran = [range(row.start, row.end) for rows in steps for row in rows if row.seq is seq]
        assert [position for part in ran for position in part] == [*range(len(seq.token_ids) - 1)]


def test_a_sequence_joins_a_running_batch(
    tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    engine = make_engine(tiny_llama, day4.Scheduler, 4, 40)
    first, second = sequences = new_sequences(PROMPTS[:2])
    engine.scheduler.waiting.append(first)
    for _ in range(3):
        engine.step()
    engine.scheduler.waiting.append(second)
    assert [(row.seq, row.num_tokens) for row in engine.step()] == [(first, 1), (second, 17)]
    engine.run([])
    assert [seq.output_ids for seq in sequences] == tiny("llama").answers(PROMPTS[:2], MAX_TOKENS)


def test_the_program(
    smollm2: tuple[Model, Any], assert_greedy: Callable[..., None], run_program: Callable[..., str]
) -> None:
    model, tokenizer = smollm2
    counts = {"A": 2, "B": 5, "C": 2, "D": 2, "E": 3}
    requests = {name: (day4.REQUESTS[name][0], count) for name, count in counts.items()}
    printed = run_program(day4, REQUESTS=requests, MAX_NUM_SEQS=2, BATCH_SIZES=(1, 2)).splitlines()
    continuous = [
        "  step      1  2  3  4  5  6  7  8",
        "  A         7  1",
        "  B         5  1  1  1  1",
        "  C         .  .  8  1",
        "  D         .  .  .  .  6  1",
        "  E         .  .  .  .  .  7  1  1",
        "  tokens   12  2  9  2  7  8  1  1",
    ]
    first = printed.index(next(line for line in printed if line.startswith("continuous")))
    assert printed[first + 1 : first + 8] == continuous
    last = printed.index("All three generated the same texts:") - 1
    rows = [line.split()[-8:-1] for line in printed[last - 3 : last]]
    steps = {14: 538, 11: 423, 8: 307}  # and the MB of weights that they read per new token
    assert rows == [f"42 {n} {n} x 538 MB {mb}".split() for n, mb in steps.items()]
    prompt_ids = tokenizer.encode(requests["B"][0])
    [text] = [line for line in printed if line.startswith("  B: ")]
    engine = make_engine(model, day4.Scheduler, 1, 3)
    seq = Sequence("B", prompt_ids, max_tokens=5)
    engine.run([seq])
    assert text == f"  B: {tokenizer.decode(seq.token_ids)!r}"
    assert_greedy(prompt_ids[: seq.num_prompt_tokens], seq.output_ids)


def test_exercise_1_latency(tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model) -> None:
    engine = make_engine(tiny_llama, solutions.LatencyScheduler, 4, 20)
    sequences = new_sequences()
    steps = engine.run(sequences)
    assert [seq.output_ids for seq in sequences] == tiny("llama").answers(PROMPTS, MAX_TOKENS)
    num_mixed = 0
    for rows in steps:
        decode = [row for row in rows if row.start >= row.seq.num_prompt_tokens]
        num_prefill = sum(row.num_tokens for row in rows) - len(decode)
        if decode:
            num_mixed += num_prefill > 0
            assert num_prefill <= 4
    assert num_mixed > 3
    assert sum(row.num_tokens for row in steps[0]) == 20


def test_exercise_2_priority(tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model) -> None:
    engine = make_engine(tiny_llama, solutions.PriorityScheduler, 1, 40)
    priorities = [2, 0, 1, 0]
    sequences = [
        solutions.PrioritySequence(str(i), list(PROMPTS[i]), MAX_TOKENS, priority=priority)
        for i, priority in enumerate(priorities)
    ]
    order = [row.seq.name for rows in engine.run(sequences) for row in rows]
    assert list(dict.fromkeys(order)) == ["1", "3", "2", "0"]
    assert [seq.output_ids for seq in sequences] == tiny("llama").answers(PROMPTS[:4], MAX_TOKENS)
