"""The block manager: sharing by content, eviction order, isolation, reference counts."""

from __future__ import annotations

import random
from array import array

import pytest
import xxhash

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

SIZE = 4


def make_seq(seq_id: int, token_ids: list[int], salt: str | None = None) -> Sequence:
    return Sequence(Request(seq_id, array("i", token_ids), SamplingParams(), cache_salt=salt))


def admit(blocks: BlockManager, seq: Sequence) -> int | None:
    return blocks.admit(seq, blocks.usable_hits(blocks.match(seq)))


def enter(blocks: BlockManager, seq: Sequence) -> Sequence:
    """Admit a sequence and schedule its whole prompt."""
    assert admit(blocks, seq) is None
    seq.num_computed = len(seq.token_ids)
    if seq.num_computed >= seq.next_full_len:
        blocks.register(seq)
    return seq


def leave(blocks: BlockManager, *sequences: Sequence) -> None:
    for seq in sequences:
        blocks.release(seq)


def num_hits(blocks: BlockManager, token_ids: list[int], salt: str | None = None) -> int:
    """Return how many tokens of a prompt are cached, without taking or touching a block."""
    return len(blocks.usable_hits(blocks.match(make_seq(999, token_ids, salt)))) * SIZE


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12])
def test_blocks_needed_and_held(length: int) -> None:
    blocks = BlockManager(8, SIZE, True)
    seq = enter(blocks, make_seq(0, list(range(length))))
    assert len(seq.held_block_ids) == -(-length // SIZE)
    assert seq.capacity == len(seq.held_block_ids) * SIZE
    blocks.check([seq])
    leave(blocks, seq)
    blocks.check([])
    assert blocks.num_free == 8


def test_growth_takes_a_block_only_when_needed() -> None:
    blocks = BlockManager(3, SIZE, True)
    seq = enter(blocks, make_seq(0, [1, 2, 3]))
    taken = {length: blocks.allocate(seq, length) for length in (3, 4, 5, 8, 9, 12)}
    assert [len(taken[length] or []) for length in taken] == [0, 0, 1, 0, 1, 0]
    assert blocks.allocate(seq, 13) is None
    assert len(seq.held_block_ids) == 3  # a failed allocation takes nothing
    blocks.check([seq])


@pytest.mark.parametrize("length", range(1, 14))
def test_one_token_is_always_left_to_compute(length: int) -> None:
    """This holds even for a fully cached prompt whose length is a multiple of the block size."""
    blocks, prompt = BlockManager(8, SIZE, True), list(range(length))
    leave(blocks, enter(blocks, make_seq(0, prompt)))
    again = make_seq(1, prompt)
    assert admit(blocks, again) is None
    assert again.num_computed == (length - 1) // SIZE * SIZE < length
    blocks.check([again])


def test_identical_prompts_share_their_full_blocks() -> None:
    blocks, prompt = BlockManager(8, SIZE, True), list(range(10))
    first, second = enter(blocks, make_seq(0, prompt)), enter(blocks, make_seq(1, prompt))
    assert second.held_block_ids[:2] == first.held_block_ids[:2]
    assert second.held_block_ids[2] != first.held_block_ids[2]
    assert blocks.num_free == 8 - 4
    blocks.check([first, second])
    leave(blocks, first)
    blocks.check([second])
    assert blocks.num_free == 8 - 3
    leave(blocks, second)
    assert blocks.num_free == 8


def test_a_later_block_is_not_shared_without_its_prefix() -> None:
    blocks = BlockManager(8, SIZE, True)
    leave(blocks, enter(blocks, make_seq(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])))
    assert num_hits(blocks, [9, 9, 9, 9, 5, 6, 7, 8, 9]) == 0
    assert num_hits(blocks, [5, 6, 7, 8, 9]) == 0
    assert num_hits(blocks, [1, 2, 3, 4, 9, 9, 9, 9, 9]) == 4
    assert num_hits(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8


def test_caching_off_shares_nothing() -> None:
    blocks, prompt = BlockManager(8, SIZE, False), list(range(9))
    first = enter(blocks, make_seq(0, prompt))
    second = enter(blocks, make_seq(1, prompt))
    assert not set(first.held_block_ids) & set(second.held_block_ids)
    blocks.check([first, second])
    leave(blocks, first, second)
    assert num_hits(blocks, prompt) == 0


def test_salt_isolates() -> None:
    blocks, prompt = BlockManager(16, SIZE, True), list(range(9))
    salts = [None, "a", "b", ""]
    for i, salt in enumerate(salts):
        assert num_hits(blocks, prompt, salt) == 0
        leave(blocks, enter(blocks, make_seq(i, prompt, salt)))
        assert num_hits(blocks, prompt, salt) == 8
    assert [num_hits(blocks, prompt, salt) for salt in ("a", "b")] == [8, 8]
    assert num_hits(blocks, prompt, "c") == 0


def test_equal_hashes_of_different_salts_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda *args, **kwargs: 7)
    blocks = BlockManager(8, SIZE, True)
    leave(blocks, enter(blocks, make_seq(0, [1, 2, 3, 4, 5], "a")))
    assert num_hits(blocks, [1, 2, 3, 4, 5], "b") == 0
    assert num_hits(blocks, [1, 2, 3, 4, 5], "a") == 4


def test_a_reused_block_is_no_longer_found() -> None:
    blocks, prompt = BlockManager(3, SIZE, True), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    leave(blocks, enter(blocks, make_seq(0, prompt)))
    assert num_hits(blocks, prompt) == 8
    other = enter(blocks, make_seq(1, [7] * 12))  # needs all three blocks
    blocks.check([other])
    leave(blocks, other)
    assert num_hits(blocks, prompt) == 0
    assert num_hits(blocks, [7] * 12) == 8


def test_a_block_stays_cached_until_it_is_reused() -> None:
    """Neither the end of its owner nor sequences that use other free blocks evict it."""
    blocks, prompt = BlockManager(6, SIZE, True), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    leave(blocks, enter(blocks, make_seq(0, prompt)))
    for i in range(1, 4):
        other = enter(blocks, make_seq(i, [10 * i]))
        assert num_hits(blocks, prompt) == 8
        leave(blocks, other)


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    blocks, prompt = BlockManager(5, SIZE, True), list(range(17))
    leave(blocks, enter(blocks, make_seq(0, prompt)))
    held, found = [], []
    for i in range(5):
        found.append(num_hits(blocks, prompt) // SIZE)
        held.append(enter(blocks, make_seq(1 + i, [100 + i])))
    assert found == [4, 4, 3, 2, 1]  # the block of the last token was never cached
    blocks.check(held)


def test_the_least_recently_used_is_evicted_first() -> None:
    blocks = BlockManager(6, SIZE, True)
    prompts = {"a": [1] * 5, "b": [2] * 5, "c": [3] * 5}
    for i, name in enumerate("abca"):  # the second use makes "a" the newest
        leave(blocks, enter(blocks, make_seq(i, prompts[name])))
    held, evicted = [], []
    for i in range(6):
        held.append(enter(blocks, make_seq(10 + i, [100 + i])))
        cached = {name for name, prompt in prompts.items() if num_hits(blocks, prompt)}
        evicted += sorted(prompts.keys() - cached - set(evicted))
    assert evicted == ["b", "c", "a"]
    blocks.check(held)


def test_a_hit_takes_an_idle_block_off_the_free_list() -> None:
    blocks, prompt = BlockManager(3, SIZE, True), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    leave(blocks, enter(blocks, make_seq(0, prompt)))
    again = enter(blocks, make_seq(1, prompt))
    assert blocks.num_free == 0
    blocks.check([again])
    assert admit(blocks, make_seq(2, [5])) == 1  # one block must be free first
    blocks.check([again])


def test_a_prompt_that_does_not_fit_takes_nothing() -> None:
    """It does not take the idle blocks it would hit, and returns how many must be free."""
    blocks = BlockManager(4, SIZE, True)
    leave(blocks, enter(blocks, make_seq(0, [1, 2, 3, 4, 5])))
    holder = enter(blocks, make_seq(1, [9] * 8))
    late = make_seq(2, [1, 2, 3, 4, *[7] * 9])
    assert blocks.num_free == 2
    assert admit(blocks, late) == 4  # includes its idle hit, which would leave the free list too
    assert (late.held_block_ids, late.num_computed) == ([], 0)
    assert blocks.num_free == 2
    blocks.check([holder])
    leave(blocks, holder)
    assert admit(blocks, late) is None
    assert late.num_computed == 4


def test_blocks_shared_with_a_running_sequence_cost_nothing() -> None:
    blocks = BlockManager(4, SIZE, True)
    running = enter(blocks, make_seq(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert blocks.num_free == 1
    late = enter(blocks, make_seq(1, [1, 2, 3, 4, 5, 6, 7, 8, 0]))
    assert blocks.num_free == 0
    blocks.check([running, late])


def test_each_full_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = xxhash.xxh3_64_intdigest
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda *args: calls.append(args) or real(*args))
    blocks = BlockManager(64, SIZE, True)
    seq = enter(blocks, make_seq(0, list(range(41))))
    num_prompt = len(calls)
    assert num_prompt == 10 + 1  # ten blocks, and the salt
    for token_id in range(40):  # grow the sequence as decoding does
        seq.token_ids.append(token_id)
        assert blocks.allocate(seq, len(seq.token_ids)) is not None
        seq.num_computed = len(seq.token_ids)
        if seq.num_computed >= seq.next_full_len:
            blocks.register(seq)
    assert len(calls) == num_prompt + 10
    blocks.release(seq)
    assert admit(blocks, seq) is None  # as after a preemption
    assert seq.num_computed == 80
    assert len(calls) == num_prompt + 10


def test_unknown_tokens_are_never_registered() -> None:
    """`num_computed` may run ahead of the tokens that the host knows."""
    blocks = BlockManager(8, SIZE, True)
    seq = enter(blocks, make_seq(0, [1, 2, 3]))
    seq.num_computed = 4  # the fourth token is sampled but not committed
    blocks.register(seq)
    assert num_hits(blocks, [1, 2, 3, 4, 5]) == 0
    seq.token_ids.append(4)
    blocks.register(seq)
    assert num_hits(blocks, [1, 2, 3, 4, 5]) == 4
    assert num_hits(blocks, [1, 2, 3, 9, 5]) == 0


def test_partly_computed_blocks_are_never_registered() -> None:
    blocks, prompt = BlockManager(8, SIZE, True), list(range(12))
    seq = make_seq(0, prompt)
    assert admit(blocks, seq) is None
    for computed in range(1, 13):
        seq.num_computed = computed
        if computed >= seq.next_full_len:
            blocks.register(seq)
        assert num_hits(blocks, [*prompt, 99]) == computed // SIZE * SIZE


def test_the_child_of_an_evicted_parent_is_served_once_the_parent_is_cached_again() -> None:
    """A cached child keeps its parent's identity, so that it still continues the same prefix."""
    blocks = BlockManager(4, SIZE, True)
    first = enter(blocks, make_seq(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    head = first.held_block_ids[0]
    leave(blocks, first)
    blocks._uncache(head)
    assert num_hits(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    leave(blocks, enter(blocks, make_seq(1, [1, 2, 3, 4])))  # the head is cached again
    assert num_hits(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    again = enter(blocks, make_seq(2, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    blocks.check([again])
    leave(blocks, again)
    assert num_hits(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_random_use_keeps_every_invariant() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        blocks, held, contents = BlockManager(12, SIZE, True), [], {}
        for i in range(120):
            if held and rng.random() < 0.45:
                leave(blocks, held.pop(rng.randrange(len(held))))
            else:
                prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 18))]
                seq = make_seq(i, prompt, rng.choice([None, "a"]))
                if admit(blocks, seq) is None:
                    # A hit must hold what was written for the same prefix and salt.
                    for index in range(seq.num_computed // SIZE):
                        prefix = (seq.request.cache_salt, *prompt[: (index + 1) * SIZE])
                        assert contents[seq.held_block_ids[index]] == prefix
                    for index in range(seq.num_computed // SIZE, len(seq.held_block_ids)):
                        contents[seq.held_block_ids[index]] = (
                            seq.request.cache_salt,
                            *prompt[: (index + 1) * SIZE],
                        )
                    seq.num_computed = len(prompt)
                    if seq.num_computed >= seq.next_full_len:
                        blocks.register(seq)
                    held.append(seq)
            blocks.check(held)
        leave(blocks, *held)
        blocks.check([])
        assert blocks.num_free == 12
