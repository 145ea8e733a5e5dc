"""Recurrent states: when snapshots are taken, which prefixes hit, and what is evicted."""

from __future__ import annotations

import random
from array import array

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.executor import StateCounts
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.features.states.state_pool import Snapshot, StatePool
from nanovllm.sampling_params import SamplingParams
from tests.engine.test_scheduler import count_lines
from tests.engine.watched import Watched, add
from tests.fake_executor import VOCAB_SIZE, FakeExecutor, reference

BLOCK_SIZE = 64


def make_core(
    num_snapshots: int, num_blocks: int = 4000, depth: int = 1, max_tokens: int = 2048
) -> EngineCore:
    counts = StateCounts(num_slots=8, num_snapshots=num_snapshots)
    blocks = BlockManager(num_blocks, BLOCK_SIZE, True)
    executor = FakeExecutor(num_blocks, BLOCK_SIZE, states=counts)
    scheduler = Scheduler(blocks, 8, max_tokens, [StatePool(counts, blocks)])
    return EngineCore(scheduler, executor, depth, max_model_len=8192)


def snapshots_of(core: EngineCore) -> dict[int, Snapshot]:
    [pool] = core.scheduler.features
    assert isinstance(pool, StatePool)
    return pool.snapshots


def run(core: EngineCore, seq_id: int, prompt: list[int], max_tokens: int = 2) -> Watched:
    seq = Watched(seq_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    add(core, seq)
    while core.has_unfinished:
        core.step()
        core.scheduler.check()
    return seq


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(count)]


@pytest.mark.parametrize("num_shared", [1600, 1500])
def test_prompts_with_a_shared_beginning_hit(num_shared: int) -> None:
    rng = random.Random(num_shared)
    core, shared = make_core(num_snapshots=100), random_tokens(rng, num_shared)
    prompts = [shared + random_tokens(rng, 2200 - num_shared) for _ in range(64)]
    sequences = [run(core, i, prompt, max_tokens=1) for i, prompt in enumerate(prompts)]
    cached = [seq.num_cached for seq in sequences]
    # The second prompt finds where they part, and takes a snapshot there.
    last_shared = num_shared // BLOCK_SIZE * BLOCK_SIZE
    assert cached == [0, 1024, *[last_shared] * 62]
    for seq, prompt in zip(sequences, prompts, strict=True):
        assert seq.output_token_ids == reference(prompt, 1)


@pytest.mark.parametrize("max_tokens", [1, 64, 130, 8192])
def test_the_token_budget_does_not_change_the_snapshots(max_tokens: int) -> None:
    """A prefill chunk that ends with a block leaves none, unless one is due there."""
    core, prompt = make_core(20, max_tokens=max_tokens), random_tokens(random.Random(6), 1500)
    run(core, 0, prompt)
    snapshots = snapshots_of(core).values()
    assert sorted(snapshot.cost for snapshot in snapshots) == [448, 1024]


def test_a_block_with_an_equal_hash_replaces_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hit and the block that replaces it are in the same plan."""
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda *args, **kwargs: 7)
    core, tokens = make_core(num_snapshots=4), random_tokens(random.Random(7), 2 * BLOCK_SIZE + 1)
    run(core, 0, tokens[: BLOCK_SIZE + 1], max_tokens=1)
    seq = run(core, 1, tokens)
    assert seq.num_cached == BLOCK_SIZE
    assert seq.output_token_ids == reference(tokens, 2)


def test_the_next_turn_of_a_chat_continues_after_the_output() -> None:
    core, prompt = make_core(num_snapshots=4), random_tokens(random.Random(1), 100)
    first = run(core, 0, prompt, max_tokens=500)
    second = run(core, 1, [*prompt, *first.output_token_ids, 5, 6])
    assert second.num_cached == 576  # the last full block that was computed
    # Of the output, only the newest snapshot was kept, besides that of the prompt.
    assert len(snapshots_of(core)) == 2


def test_the_cheapest_snapshot_is_evicted_first_but_ages() -> None:
    rng = random.Random(2)
    core = make_core(num_snapshots=2)
    long, short = random_tokens(rng, 1000), [random_tokens(rng, 70) for _ in range(40)]
    run(core, 0, long)
    for i in range(3):
        run(core, 1 + i, short[i])
    assert run(core, 10, long).num_cached == 960  # the short ones evicted each other
    for i in range(40):
        run(core, 20 + i, short[i])
    assert run(core, 90, long).num_cached == 0


def test_the_cost_of_a_snapshot_counts_from_one_of_another_sequence() -> None:
    core, prompt = make_core(num_snapshots=20), random_tokens(random.Random(5), 900)
    for i in range(2):  # both enter before the first snapshot exists
        add(core, Watched(i, prompt, SamplingParams(max_tokens=100, ignore_eos=True)))
    while core.has_unfinished:
        core.step()
        core.scheduler.check()
    costs = [snapshot.cost for snapshot in snapshots_of(core).values()]
    assert sorted(costs) == [64, 896]


def test_snapshots_leave_with_their_blocks() -> None:
    rng = random.Random(3)
    core = make_core(num_snapshots=50, num_blocks=40)
    first = random_tokens(rng, 2000)
    run(core, 0, first)
    assert run(core, 1, first).num_cached == 1984
    run(core, 2, random_tokens(rng, 2400))  # takes all blocks
    assert run(core, 3, first).num_cached == 0
    core.scheduler.blocks.reset_prefix_cache()
    core.scheduler.check()
    assert not snapshots_of(core)


def test_without_prefix_caching_prompts_are_not_split() -> None:
    counts = StateCounts(num_slots=2, num_snapshots=0)
    blocks = BlockManager(100, BLOCK_SIZE, False)
    executor = FakeExecutor(100, BLOCK_SIZE, states=counts)
    scheduler = Scheduler(blocks, 2, 8192, [StatePool(counts, blocks)])
    core = EngineCore(scheduler, executor, 1, max_model_len=6000)
    prompt = random_tokens(random.Random(4), 3000)
    assert run(core, 0, prompt, max_tokens=1).output_token_ids == reference(prompt, 1)
    assert executor.plans[0].counts.tolist() == [3000]


def test_equal_prompts_wait_for_the_first() -> None:
    """If it is aborted, the next one computes the prompt; a short prompt has no snapshot to use."""
    core, rng = make_core(num_snapshots=20, max_tokens=64), random.Random(7)
    prompt, short = random_tokens(rng, 200), random_tokens(rng, BLOCK_SIZE)
    prompts, params = [prompt] * 4 + [short] * 2, SamplingParams(max_tokens=2)
    watched = [Watched(i, each, params, request_id="many") for i, each in enumerate(prompts)]
    watched.append(Watched(6, prompt, params, request_id="other"))
    for each in watched:
        add(core, each)
    assert list(core.scheduler.postponed) == [1, 2, 3]
    core.step()
    core.finish(0, "abort")
    core.finish(2, "abort")
    core.step()
    assert list(core.scheduler.postponed) == [3]
    while core.has_unfinished:
        core.step()
        core.scheduler.check()
    assert watched[1].num_cached == 0
    assert watched[3].num_cached == 192
    for each in (watched[1], watched[3]):
        assert each.output_token_ids == reference(prompt, 2)


@pytest.mark.parametrize("num_prompts", [1, 1000])
def test_a_step_does_not_pay_for_equal_prompts_that_wait(num_prompts: int) -> None:
    def num_lines(num_waiting: int) -> int:
        core, rng = make_core(num_snapshots=20), random.Random(8)
        for seq_id in range(8):  # these take all slots
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            add(core, Watched(seq_id, random_tokens(rng, 70), params))
        core.step()
        params, firsts = SamplingParams(max_tokens=2), min(num_prompts, num_waiting // 2)
        for seq_id in range(num_waiting):
            prompt = [1 + seq_id % firsts % 20, 1 + seq_id % firsts // 20] * 50
            add(core, Watched(8 + seq_id, prompt, params, request_id="many"))
        assert len(core.scheduler.postponed) == num_waiting - firsts
        return count_lines(core, 8)

    assert num_lines(2000) == num_lines(20)


def test_prompts_of_one_request_run_in_one_batch() -> None:
    """Rows that end early for a snapshot do not make the other prompts of the request wait."""

    def num_steps(request_ids: list[str]) -> int:
        core, rng = make_core(num_snapshots=20), random.Random(0)
        for seq_id, request_id in enumerate(request_ids):
            prompt = array("i", random_tokens(rng, 4 * BLOCK_SIZE + 3))
            core.add(Request(seq_id, prompt, SamplingParams(max_tokens=1), request_id=request_id))
        steps = 0
        while core.has_unfinished:
            core.step()
            steps += 1
        return steps

    assert num_steps(["many"] * 20) == num_steps([str(i) for i in range(20)])
