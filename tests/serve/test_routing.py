"""Requests go to the replica with their prefix, or to the least loaded one."""

from __future__ import annotations

import random
from array import array

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.routing import MAX_EXTRA, PrefixRouter

SIZE = 16


def tokens(seed: int, num_blocks: int = 4) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_blocks * SIZE)


def send(router: PrefixRouter[int], prompt: list[int], request_id: object = None) -> int:
    replica = router.choose(prompt)
    router.started(request_id or object(), replica, len(prompt))
    return replica


def test_a_prompt_goes_where_its_longest_prefix_went() -> None:
    router = PrefixRouter(range(3), SIZE)
    shared = tokens(1)
    first = router.choose(shared)
    second = router.choose(tokens(2))
    longer = router.choose([*tokens(3), *shared])
    assert {first, second, longer} == {0, 1, 2}
    assert router.choose([*shared, 1, 2, 3]) == first
    assert router.choose([*tokens(3), *tokens(9)]) == longer
    assert router.choose(array("i", tokens(2))) == second


def test_blocks_are_those_of_the_prefix_cache() -> None:
    """Only full blocks count; a block's key includes everything before it and the salt."""
    router = PrefixRouter(range(2), SIZE)
    prompt = tokens(1, 3)
    assert router.choose(prompt, "mine") == 0
    assert router.choose(prompt[: 2 * SIZE - 1], "mine") == 0
    assert router.choose(prompt[: 2 * SIZE], "yours") == 1
    assert router.choose(prompt, "mine") == 0
    assert router.choose(prompt[SIZE:], "mine") == 1  # later blocks alone are another prefix
    seq = Sequence(Request(0, array("i", prompt), SamplingParams(), cache_salt="mine"))
    blocks = BlockManager(8, SIZE, enable_caching=True)
    blocks.admit(seq, [])
    seq.num_computed = len(prompt)
    blocks.register(seq)
    assert list(blocks.cached) == router._hashes(prompt, "mine")


def test_unknown_prompts_go_to_the_least_loaded() -> None:
    router = PrefixRouter(range(3), SIZE)
    assert [send(router, tokens(i), f"request {i}") for i in range(6)] == [0, 1, 2, 0, 1, 2]
    router.finished("request 4")
    router.finished("request 4")  # a second call has no effect
    assert router.loads == {0: 8 * SIZE, 1: 4 * SIZE, 2: 8 * SIZE}
    assert send(router, [1]) == 1


def test_who_remembers_little_gets_no_more_than_others() -> None:
    """Neither a finished long prompt nor a new engine makes the router overload one replica."""
    router = PrefixRouter(range(2), SIZE)
    router.choose(tokens(1, 100))  # it ended immediately
    sent = {f"request {i}": send(router, tokens(2 + i), f"request {i}") for i in range(10)}
    assert 3 <= [*sent.values()].count(0) <= 5
    router.lost(1)
    router.joined(1)
    under_way = {name: replica for name, replica in sent.items() if replica == 0}
    for i in range(10, 70):
        under_way[f"request {i}"] = send(router, tokens(10 + i), f"request {i}")
        if len(under_way) > 6:
            oldest = next(iter(under_way))
            router.finished(oldest)
            del under_way[oldest]
    assert 20 <= [*under_way.values()].count(0) * 10 <= 40
    assert abs(router.loads[0] - router.loads[1]) <= 4 * 4 * SIZE


def test_a_prefix_moves_when_its_replica_has_far_more_to_do() -> None:
    router = PrefixRouter(range(2), SIZE)
    prompt = tokens(1)
    sent = [send(router, prompt) for _ in range(MAX_EXTRA + 3)]
    # The first requests go to one replica; once both have the prefix, load decides.
    assert sent == [0] * (MAX_EXTRA + 1) + [1, 1]


def test_what_is_remembered_has_a_bound_and_loses_the_oldest_tails_first() -> None:
    router = PrefixRouter(range(2), SIZE, max_blocks=6)
    old, new = tokens(1), tokens(2)
    assert router.choose(old) == 0
    router.lost(1)
    router.choose(new)
    router.joined(1)
    lengths = [router._replicas[0].num_known(router._hashes(each, None)) for each in (old, new)]
    assert lengths == [2, 4]


def test_a_lost_replica_gets_nothing_until_another_takes_its_place() -> None:
    router = PrefixRouter(range(2), SIZE)
    prompt = tokens(1)
    assert send(router, prompt, "lost") == 0
    router.lost(0)
    assert [send(router, prompt) for _ in range(20)] == [1] * 20
    router.joined(0)
    router.finished("lost")
    assert router.loads[0] == 0
    assert send(router, prompt) == 0  # its cache is empty, but so is its load
    router.lost(0)
    router.lost(1)
    router.lost(1)
    with pytest.raises(EngineError, match="no replica"):
        router.choose(prompt)


@pytest.mark.parametrize("seed", range(20))
def test_shared_prefixes_are_hit_as_by_one_engine_and_loads_are_alike(seed: int) -> None:
    rng = random.Random(seed)
    order = [i % 8 for i in range(64)]
    rng.shuffle(order)
    router = PrefixRouter(range(2), SIZE)
    seen: set[tuple[int, int]] = set()
    for prefix in order:
        replica = send(router, [*tokens(prefix), *rng.choices(range(1000), k=9)])
        seen.add((replica, prefix))
    assert 64 - len(seen) >= 0.9 * (64 - 8)  # cache hits, compared to one engine
    assert max(router.loads.values()) < 2 * min(router.loads.values())
