"""Day 3: where the blocks are does not change the output."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import day3 as solutions
import pytest

import day3_paged_cache as day3
from common import Model
from tests.checkpoints import VOCAB_SIZE, TinyCheckpoint
from tests.learn.test_day1 import PROMPTS

NUM_BLOCKS = 40


def sequences(prompts: list[list[int]], max_tokens: int) -> list[day3.Sequence]:
    return [day3.Sequence(str(i), list(ids), max_tokens) for i, ids in enumerate(prompts)]


def shuffled_blocks(block_size: int) -> day3.BlockManager:
    blocks = day3.BlockManager(NUM_BLOCKS, block_size)
    random.Random(block_size).shuffle(blocks.free_ids)
    return blocks


@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_equals_transformers(
    block_size: int, tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    blocks = shuffled_blocks(block_size)
    cache = day3.PagedCache(tiny_llama.config, NUM_BLOCKS, block_size)
    requests = sequences(PROMPTS, max_tokens=12)
    for running in day3.take_turns(tiny_llama, cache, blocks, requests, max_num_seqs=3):
        held = [block_id for seq in running for block_id in seq.block_table]
        assert sorted([*held, *blocks.free_ids]) == list(range(NUM_BLOCKS))
        for seq in running:
            num_slots = len(seq.block_table) * block_size
            assert seq.num_computed <= num_slots < seq.num_computed + block_size
    assert len(blocks.free_ids) == NUM_BLOCKS
    assert [seq.output_ids for seq in requests] == tiny("llama").answers(PROMPTS, max_tokens=12)


def test_a_full_pool_is_an_error(tiny_llama: Model) -> None:
    cache, blocks = day3.PagedCache(tiny_llama.config, 2, 4), day3.BlockManager(2, 4)
    [seq] = sequences([[5, 6, 7]], max_tokens=8)
    with pytest.raises(MemoryError):
        list(day3.take_turns(tiny_llama, cache, blocks, [seq], max_num_seqs=1))
    assert seq.num_computed == 8


def test_the_program(
    smollm2: tuple[Model, Any], assert_greedy: Callable[..., None], run_program: Callable[..., str]
) -> None:
    model, tokenizer = smollm2
    fewer = {name: (text, count // 2) for name, (text, count) in day3.REQUESTS.items()}
    printed = run_program(day3, NUM_BLOCKS=12, REQUESTS=fewer)
    turns = ["AaBbCC......", "AABbCCc.....  A finished", "..BbCCcDd..."]
    assert [f"     {i}  {line}" for i, line in enumerate(turns, 1)] == printed.splitlines()[4:7]
    assert "day 2 would waste" in printed
    # One of the sequences suffices: the others are checked with the tiny model.
    prompt, max_tokens = fewer["C"]
    cache, blocks = day3.PagedCache(model.config, 8, 4), day3.BlockManager(8, 4)
    seq = day3.Sequence("C", tokenizer.encode(prompt), max_tokens)
    list(day3.take_turns(model, cache, blocks, [seq], max_num_seqs=1))
    assert f"  C: {tokenizer.decode(seq.token_ids)!r}" in printed
    assert_greedy(seq.token_ids[: seq.num_prompt_tokens], seq.output_ids)


def test_exercise_1_fork(tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model) -> None:
    for num_prompt_tokens in (3, 8, 9):
        prompt = random.Random(1).choices(range(VOCAB_SIZE), k=num_prompt_tokens)
        cache = day3.PagedCache(tiny_llama.config, NUM_BLOCKS, 4)
        blocks = solutions.SharingBlockManager(NUM_BLOCKS, 4)
        [seq] = sequences([prompt], max_tokens=8)
        day3.append_next_token(tiny_llama, cache, blocks, seq)
        fork = blocks.fork(cache, seq)
        num_full = num_prompt_tokens // 4
        assert fork.block_table[:num_full] == seq.block_table[:num_full]
        assert not set(fork.block_table[num_full:]) & set(seq.block_table)
        fork.token_ids[-1] = 7
        for each in (seq, fork, fork, seq, seq, fork):
            day3.append_next_token(tiny_llama, cache, blocks, each)
        assert seq.output_ids == tiny("llama").generate(prompt, 4)
        assert fork.output_ids == [7, *tiny("llama").generate([*prompt, 7], 3)]
        blocks.release(seq)
        assert len(blocks.free_ids) == NUM_BLOCKS - len(fork.block_table)
        blocks.release(fork)
        assert len(blocks.free_ids) == NUM_BLOCKS


def test_exercise_2_swap(tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model) -> None:
    cache, blocks = day3.PagedCache(tiny_llama.config, NUM_BLOCKS, 4), shuffled_blocks(4)
    seq, other = sequences(PROMPTS[:2], max_tokens=8)
    for _ in range(4):
        day3.append_next_token(tiny_llama, cache, blocks, seq)
    before = list(seq.block_table)
    saved = solutions.swap_out(cache, blocks, seq)
    assert len(blocks.free_ids) == NUM_BLOCKS
    cache.k.zero_()
    cache.v.zero_()
    day3.append_next_token(tiny_llama, cache, blocks, other)
    solutions.swap_in(cache, blocks, seq, saved)
    assert seq.block_table != before
    for _ in range(4):
        day3.append_next_token(tiny_llama, cache, blocks, seq)
    assert seq.output_ids == tiny("llama").generate(PROMPTS[0], 8)
