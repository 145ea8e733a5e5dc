"""Seeded fuzz test: any schedule gives the same tokens as a reference without a cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.executor import StateCounts, Windows
from nanovllm.engine.feature import Feature
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import StepPlan
from nanovllm.features.grammar.grammar_feature import GrammarFeature
from nanovllm.features.latency.prompt_budget import PromptBudget
from nanovllm.features.speculation.drafter import Drafter
from nanovllm.features.speculation.ngram_proposer import NgramProposer
from nanovllm.features.states.state_pool import StatePool
from nanovllm.sampling_params import SamplingParams
from tests.engine.watched import Watched, add
from tests.fake_executor import EOS, VOCAB_SIZE, Done, FakeExecutor, predict, reference

BLOCK_SIZE = 4
GRAMMAR: Any = SimpleNamespace(text="")


class RandomDrafter(Drafter):
    """Drafts what the device will predict, with random lengths, pauses and mistakes."""

    def __init__(self, rng: random.Random, windows: Windows = (None,)) -> None:
        super().__init__(NgramProposer(has_store=True), num_speculative_tokens=1)
        self.rng, self.windows = rng, windows

    def is_promising(self, seq: Sequence) -> bool:
        return self.rng.random() < 0.5

    def choose(self, seq: Sequence, most: int) -> list[int]:
        super().choose(seq, most)
        tokens = seq.token_ids.tolist()
        for _ in range(min(most, self.rng.randrange(6))):
            tokens.append(predict(tokens, self.windows))
            if self.rng.random() < 0.2:
                tokens[-1] = self.rng.randrange(1, VOCAB_SIZE)
        return tokens[len(seq.token_ids) :]


class LateMatcher:
    """Allows every token. Its grammar, and some of its bitmasks, are late."""

    def __init__(self, rng: random.Random) -> None:
        self.num_polls = rng.choice([0, 0, 5, 9])  # until it is ready
        self.was_late = False  # whether its next bitmask was late already

    @property
    def is_ready(self) -> bool:
        self.num_polls = max(self.num_polls - 1, 0)
        return self.num_polls == 0

    def finishes(self, token_id: int) -> bool:
        self.was_late = False
        return False


class LateGrammars:
    """A grammar engine whose matchers are late."""

    def __init__(self, rng: random.Random, is_used: bool = True) -> None:
        self.rng, self.is_used = rng, is_used
        self.num_late = 0

    def matcher(self, grammar: Any, stop_token_ids: frozenset[int]) -> LateMatcher:
        return LateMatcher(self.rng)

    def masks(self, rows: list[Any], allocate: Any) -> tuple[np.ndarray, list[int]]:
        late = []
        for index, (matcher, drafts) in enumerate(rows):
            assert matcher.num_polls == 0
            if not drafts and not matcher.was_late and self.rng.random() < 0.2:
                matcher.num_polls, matcher.was_late = self.rng.choice([1, 2, 4]), True
                late.append(index)
        self.num_late += len(late)
        return allocate(sum(1 + len(drafts) for _, drafts in rows), 1), late


def build_core(
    *,
    num_blocks: int,
    num_slots: int,
    budget: int,
    caching: bool,
    depth: int,
    is_paced: bool,
    drafter: Drafter | None = None,
    num_snapshots: int | None = None,
    grammars: LateGrammars | None = None,
    windows: Windows = (None,),
) -> EngineCore:
    prompt_budget = (
        PromptBudget(1e-9, min_prompt_tokens=3) if is_paced else None
    )  # prompts get the smallest budget
    counts = None if num_snapshots is None else StateCounts(num_slots, num_snapshots)
    blocks = BlockManager(num_blocks, BLOCK_SIZE, caching, windows)
    states = None if counts is None else StatePool(counts, blocks)
    features: list[Feature] = [each for each in (states, prompt_budget, drafter) if each]
    if grammars is not None:
        if grammars.is_used:
            features.append(GrammarFeature(lambda: grammars))
        grammars.rng.shuffle(features)  # their order does not matter
    scheduler = Scheduler(blocks, num_slots, budget, features)
    executor = FakeExecutor(num_blocks, BLOCK_SIZE, states=counts, windows=windows)
    return EngineCore(scheduler, executor, depth, max_model_len=1000)


def run(core: EngineCore, arrivals: list[tuple[int, Watched]], aborts: dict[int, int]) -> None:
    """Add each sequence at its step, abort some midway, and check every invariant at every step."""
    step = 0
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    while arrivals or core.has_unfinished:
        while arrivals and arrivals[0][0] <= step:
            add(core, arrivals.pop(0)[1])
        for seq_id, abort_step in aborts.items():
            if abort_step == step:
                core.finish(seq_id, "abort")
        core.step()
        core.scheduler.check()
        serial = [seq for seq in core._sequences.values() if seq.is_serial]
        assert all(seq.num_pending <= 1 for seq in serial)
        step += 1
        assert step < 5000, "stuck"
    while core._in_flight:  # steps left in flight by a late finish
        core.step()


def num_blocks(rng: random.Random, windows: Windows) -> int:
    """Return a pool so small that sequences preempt each other; windows need few blocks."""
    if None not in windows:
        return rng.choice([4, 8, 20])
    return sum(rng.choice([9, 10, 20] if window is None else [3, 4, 6]) for window in windows)


def make_requests(rng: random.Random) -> list[tuple[list[int], int]]:
    base = [rng.randrange(1, 23) for _ in range(12)]
    requests = []
    for _ in range(8):
        tail = [rng.randrange(1, 23) for _ in range(rng.randrange(0, 10))]
        prompt = base[: rng.randrange(1, 13)] + tail
        requests.append((prompt, rng.randrange(1, 14)))
    return requests + requests[:2]  # identical prompts, some admitted in one step


def make_sequences(requests: list[tuple[list[int], int]]) -> list[Watched]:
    return [
        Watched(
            i,
            prompt,
            SamplingParams(
                max_tokens=n,
                priority=i * n % 2,
                logits_processors=["some:function"] if i % 3 == 0 else [],
            ),
            stop_token_ids=frozenset({EOS}),
            pooling="mean" if i in (2, 5) else None,
            grammar=GRAMMAR if i % 3 == 1 else None,
            request_id="many" if i % 2 else "",
        )
        for i, (prompt, n) in enumerate(requests)
    ]


def repeat_prompts(rng: random.Random, requests: list[tuple[list[int], int]]) -> list[int]:
    """Give some requests the prompt of the previous one; return the first with each prompt."""
    firsts = list(range(len(requests)))
    for i in range(1, len(requests)):
        if rng.random() < 0.3:
            firsts[i] = firsts[i - 1]
            requests[i] = requests[firsts[i]][0], requests[i][1]
    return firsts


@pytest.mark.endurance
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (None, 6, 6), (None, 3, 9)])
@pytest.mark.parametrize(
    ("caching", "depth"),
    [
        *((True, depth) for depth in range(3)),
        (False, 1),
        *(pytest.param(False, depth, marks=pytest.mark.slow) for depth in (0, 2)),
    ],
)
def test_any_schedule_gives_the_reference_tokens(
    depth: int,
    caching: bool,
    windows: Windows,
    monkeypatch: pytest.MonkeyPatch,
    count: Callable[[int], int],
) -> None:
    monkeypatch.setattr("nanovllm.features.states.state_pool.INTERVAL", 8)
    num_preemptions = num_hits = num_drafted = num_accepted = num_restored = num_late = 0
    for seed in range(count(1000)):
        rng = random.Random(seed)
        requests = make_requests(rng)
        has_states = rng.random() < 0.25
        most_snapshots = rng.choice([1, 3, 20]) if caching else 0
        core = build_core(
            num_blocks=num_blocks(rng, windows),
            num_slots=rng.choice([2, 4, 8]),
            budget=rng.choice([3, 7, 32]),
            caching=caching,
            depth=depth,
            is_paced=rng.random() < 0.5,
            drafter=RandomDrafter(rng, windows) if not has_states and rng.random() < 0.75 else None,
            num_snapshots=most_snapshots if has_states else None,
            grammars=(grammars := LateGrammars(rng, is_used=depth < 2)),
            windows=windows,
        )
        firsts = repeat_prompts(rng, requests)
        sequences = make_sequences(requests)
        aborts = {i: rng.randrange(30) for i in range(10) if rng.random() < 0.1}
        steps = [rng.choice([0, 0, 0, 5, 9]) for _ in sequences]
        arrivals = [(steps[firsts[i]], seq) for i, seq in enumerate(sequences)]
        run(core, arrivals, aborts)

        for seq, (prompt, max_tokens) in zip(sequences, requests, strict=True):
            want = reference(prompt, max_tokens, windows)
            if seq.request.pooling is not None:
                assert not seq.output_token_ids
                assert seq.finish_reason == "abort" or seq.pooled.tolist() == [sum(prompt)]
            elif seq.finish_reason == "abort":
                assert seq.output_token_ids == want[: len(seq.output_token_ids)]
            else:
                assert seq.output_token_ids == want, (seed, seq.seq_id)
                assert seq.finish_reason == ("stop" if want[-1] == EOS else "length")
        assert core.scheduler.blocks.num_free == core.scheduler.blocks.num_blocks
        num_drafted += core.scheduler.draft_counts.num_draft_tokens
        num_accepted += core.scheduler.draft_counts.num_accepted_tokens
        num_late += grammars.num_late
        num_preemptions += core.scheduler.num_preemptions
        num_hits += sum(seq.num_cached for seq in sequences)
        first_snapshot = core.scheduler.max_num_seqs + 2
        copies = [copy for plan in core.executor.plans for copy in plan.state_copies]
        num_restored += sum(copy.source >= first_snapshot for copy in copies)
    assert num_preemptions > 0.4 * count(1000)
    assert num_hits > 4 * count(1000) or not caching
    assert num_late > 0.5 * count(1000) or depth == 2
    assert num_restored > 0.15 * count(1000) or not caching
    assert num_drafted > 1.2 * num_accepted > 2 * count(1000)


class LosingExecutor(FakeExecutor):
    """Loses some steps, after which the KV cache and the InputBatch hold garbage."""

    def __init__(self, rng: random.Random, num_blocks: int, windows: Windows) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, windows=windows)
        self.rng = rng
        self.num_lost = 0

    def submit(self, plan: StepPlan) -> Done:
        done = super().submit(plan)
        if self.rng.random() > 0.1:
            return done
        self.num_lost += 1
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            for position in range(start, start + count):
                for group in range(len(self.windows)):
                    self.kv[self._address(slot, position, group)] = 200  # not a valid token
            self.tokens[slot][start + count] = 0
        done.value = replace(done.value, tokens=0 * done.value.tokens, is_lost=True)
        return done


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_lost_steps_change_no_token(depth: int) -> None:
    num_lost = 0
    for seed in range(50):
        rng = random.Random(seed)
        requests = make_requests(rng)
        windows: Windows = [(None,), (None, 6), (5,), (None, 3, 9)][seed % 4]
        pool_size = max(20, 12 * len(windows))
        executor = LosingExecutor(rng, pool_size, windows)
        budget = PromptBudget(1e-9, min_prompt_tokens=3) if seed % 2 else None
        drafter = RandomDrafter(rng, windows) if seed % 3 else None
        # At depth 2 there may be two steps without bitmasks, of which `sample` completes one.
        grammars = GrammarFeature(partial(LateGrammars, rng)) if depth < 2 else None
        features: list[Feature] = [each for each in (budget, drafter, grammars) if each]
        rng.shuffle(features)
        blocks = BlockManager(pool_size, BLOCK_SIZE, True, windows)
        scheduler = Scheduler(blocks, 4, 16, features)
        core = EngineCore(scheduler, executor, depth, max_model_len=1000)
        repeat_prompts(rng, requests)
        sequences = make_sequences(requests)
        run(core, [(rng.choice([0, 5]), seq) for seq in sequences], {})
        for seq, asked in zip(sequences, requests, strict=True):
            want = [] if seq.request.pooling is not None else reference(*asked, windows)
            assert seq.output_token_ids == want
        assert blocks.num_free == pool_size
        num_lost += executor.num_lost
    assert num_lost > 50


@pytest.mark.parametrize("depth", [0, 1])
def test_equal_hashes_never_share_a_wrong_block(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all hashes collide, parents and tokens alone must distinguish prompts."""
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda *args, **kwargs: 7)
    for seed in range(50):
        rng = random.Random(seed)
        requests = make_requests(rng)
        core = build_core(
            num_blocks=20, num_slots=4, budget=16, caching=True, depth=depth, is_paced=False
        )
        sequences = make_sequences(requests)
        run(core, [(0, seq) for seq in sequences], {})
        want = [[] if i in (2, 5) else reference(*asked) for i, asked in enumerate(requests)]
        assert [seq.output_token_ids for seq in sequences] == want
