"""Proposals equal those of a search without an index, and stop while they do not pay off."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Tokens

import pytest

from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.features.speculation import ngram_proposer
from nanovllm.features.speculation.drafter import MAX_PAUSE, Drafter, Trial
from nanovllm.features.speculation.ngram_proposer import (
    MAX_COMPARED,
    ORDER,
    MatchIndex,
    NgramProposer,
)
from nanovllm.features.speculation.proposer import Proposal
from nanovllm.sampling_params import SamplingParams


def make_sequence(seq_id: int, prompt: Tokens[int], cache_salt: str | None = None) -> Sequence:
    params = SamplingParams(max_tokens=10_000)
    return Sequence(Request(seq_id, array("i", prompt), params, seed=0, cache_salt=cache_salt))


def followers(tokens: list[int], context: list[int]) -> dict[int, int]:
    """Return the length of each earlier match of the end of `context`, by the position after it."""
    found = {}
    for end in range(ORDER, len(tokens)):
        pairs = zip(reversed(tokens[:end]), reversed(context[-MAX_COMPARED:]), strict=False)
        length = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        length = min(end, len(context), MAX_COMPARED) if length is None else length
        if length >= ORDER:
            found[end] = length
    return found


def test_matches_are_the_longest_of_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few token ids, matches are long and many; with few hashes, most of them collide."""
    for seed in range(200):
        rng = random.Random(seed)
        if seed % 2:
            monkeypatch.setattr(ngram_proposer, "FACTOR", 0)  # equal last tokens, equal hashes
        else:
            monkeypatch.undo()
        tokens: list[int] = []
        index = MatchIndex()
        while len(tokens) < 60:
            new = [rng.randrange(2 + seed % 4) for _ in range(rng.choice([1, 1, 1, 2, 9, 20]))]
            index.extend(array("i", new))
            tokens += new
            match, known = index.find(array("i", tokens)), followers(tokens, tokens)
            if not seed % 2:
                # The newest position is the end itself, which nothing follows.
                newest = sorted(known, reverse=True)[: ngram_proposer.MAX_CANDIDATES - 1]
                best = max((known[end] for end in newest), default=None)
                assert (match.length if match else None) == best
            if match is not None:
                ends = [end for end in known if known[end] == match.length]
                assert match.start == max(ends) if not seed % 2 else match.start in ends


def test_a_repetition_continues() -> None:
    proposer = NgramProposer(has_store=False)
    assert proposer.propose(make_sequence(1, [1, 2, 3, 4]), 5) is None
    proposal = proposer.propose(make_sequence(2, [9, 1, 2, 3, 4, 1, 2, 3]), 6)
    assert proposal is not None
    assert proposal.token_ids == [4, 1, 2, 3, 4, 1]


def test_outputs_are_stored_by_cache_salt() -> None:
    """Neither prompts nor outputs with another salt are proposed, nor is what follows an output."""
    proposer = NgramProposer(has_store=True)
    first = make_sequence(1, [7, 8, 9, 50, 51], cache_salt="a")
    first.token_ids.extend([1, 2, 3, 4])
    second = make_sequence(2, [7], cache_salt="a")
    second.token_ids.extend([5, 6])
    proposer.finished(first)
    proposer.finished(second)

    def proposed(tokens: list[int], salt: str | None, has_store: bool = True) -> list[int] | None:
        proposal = proposer.propose(make_sequence(3, tokens, salt), 7)
        proposer.finished(make_sequence(3, tokens, salt))
        return None if proposal is None else proposal.token_ids

    assert proposed([0, 1, 2, 3], "a") == [4]
    assert proposed([0, 2, 3, 4], "a") is None
    assert proposed([7, 8, 9], "a") is None
    assert proposed([0, 1, 2, 3], "b") is None
    assert proposed([0, 1, 2, 3], None) is None


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_proposer, "MAX_STORED", 100)
    proposer, rng = NgramProposer(has_store=True), random.Random(0)
    for seq_id in range(300):
        seq = make_sequence(seq_id, [1], cache_salt=str(seq_id % 20))
        proposer.propose(seq, 1)
        seq.token_ids.extend(rng.randrange(100) for _ in range(30))
        proposer.finished(seq)
    assert not proposer._indices
    stores = proposer._stores.values()
    assert len(stores) == ngram_proposer.MAX_STORES
    kept = [len(index.tokens) for store in stores for index in store.generations]
    assert max(kept) <= 100 + 31


class Always:
    """Proposes as many drafts as possible; whether they are right is decided elsewhere."""

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        return Proposal([1] * most, 0)

    def finished(self, seq: Sequence) -> None: ...


def simulate(
    num_seqs: int, num_steps: int, acceptance: float, seconds_per_row: float, drafter: Drafter
) -> tuple[float, int]:
    """Return tokens per second, compared to plain decoding, and how many drafts were made.

    A step takes 1 second, and `seconds_per_row` for each row.
    """
    rng, seqs = random.Random(0), [make_sequence(i, [1]) for i in range(num_seqs)]
    total_seconds = num_tokens = total_drafts = 0.0
    for _ in range(num_steps):
        drafter.begin(num_seqs, 0 if num_seqs > 1 else 100)
        counts = [len(drafter.choose(seq, 100)) for seq in seqs]
        new = num_seqs
        for seq, count in zip(seqs, counts, strict=True):
            num_right = 0
            while num_right < count and rng.random() < acceptance:
                num_right += 1
            if count:
                drafter.verified(seq, count, num_right)
            new += num_right
        num_rows = num_seqs + sum(counts)
        seconds = (1 + seconds_per_row * num_rows) * rng.uniform(0.95, 1.05)
        drafter.measured(num_seqs, num_rows, new, seconds)
        total_seconds += seconds
        num_tokens += new
        total_drafts += sum(counts)
    plain = num_seqs / (1 + seconds_per_row * num_seqs)
    return num_tokens / total_seconds / plain, int(total_drafts)


@pytest.mark.parametrize(
    ("num_seqs", "acceptance", "seconds_per_row", "at_least"),
    [
        (1, 1.0, 0.1, 4.0),  # 8 tokens in 1.7 seconds are the maximum
        (1, 0.9, 0.3, 1.25),
        (1, 0.5, 0.0, 1.8),
        (1, 0.0, 0.3, 0.98),
        (1, 0.5, 1.0, 0.98),
        (1, 0.9, 1.0, 0.98),  # a step with one more row takes twice as long
        (4, 0.9, 0.02, 1.7),
        (4, 0.0, 0.3, 0.98),
        (4, 0.9, 1.0, 0.98),
        (8, 0.0, 0.3, 0.98),
        (8, 0.7, 0.1, 1.05),
        (30, 0.0, 0.3, 0.98),
    ],
)
def test_drafts_follow_what_they_gain(
    num_seqs: int, acceptance: float, seconds_per_row: float, at_least: float
) -> None:
    drafter = Drafter(Always(), 7)
    early, _ = simulate(num_seqs, 300, acceptance, seconds_per_row, drafter)
    assert early > 0.95 * at_least
    speedup, _ = simulate(num_seqs, 1500, acceptance, seconds_per_row, drafter)
    assert speedup > at_least


def test_drafts_are_tried_again() -> None:
    drafter = Drafter(Always(), 7)
    _, num_wrong = simulate(1, 1000, 0.0, 0.1, drafter)
    assert 5 < num_wrong < 100
    _, num_right = simulate(1, 8 * MAX_PAUSE, 1.0, 0.1, drafter)
    assert num_right > 4 * MAX_PAUSE


def test_a_step_of_a_pause_is_counted_once() -> None:
    """The scheduler asks once whether to wait and, if not, once for drafts."""
    drafter, seq = Drafter(Always(), 3), make_sequence(0, [1, 2, 3])
    for num_rows in (1, 2, 1, 2):  # the costs of both numbers of rows are known
        drafter.measured(1, num_rows, 1, 1.0)
    drafter._state(seq).num_paused, seq.num_computed = 5, 2
    drafter.begin(1, 8)
    assert not drafter.must_wait(seq)  # its tokens are known
    assert drafter.choose(seq, 3) == []
    assert drafter._state(seq).num_paused == 4
    seq.num_tokens, seq.num_computed = 4, 3  # one token is pending
    assert not drafter.must_wait(seq)
    assert drafter._state(seq).num_paused == 3


@pytest.mark.parametrize(("speedup", "is_on"), [(1.03, False), (1.1, True)])
def test_a_trial_needs_a_clear_gain(speedup: float, is_on: bool) -> None:
    trial, num_on = Trial(), 0
    for _ in range(5000):
        num_on += trial.is_on
        trial.add(1, 1 / speedup if trial.is_on else 1.0)
    assert (num_on > 4000) == is_on
    assert (num_on < 1000) != is_on
