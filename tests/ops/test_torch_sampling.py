"""Compare sampling with exact probabilities: a float64 reference, and counts of sampled tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.ops.torch_sampling import (
    SamplingColumns,
    sample,
    sampling_probs,
    uniform,
)
from nanovllm.ops.torch_top_k_top_p import NUM_CANDIDATES
from nanovllm.sampling_params import NO_TOKEN

INF = math.inf
SMALLEST = 1e-36  # probabilities below this may vanish in float32


class Row(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def columns(rows: list[Row]) -> SamplingColumns:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    return SamplingColumns(
        temperature=column([row.temperature for row in rows], torch.float32),
        top_k=column([row.top_k for row in rows], torch.int32),
        top_p=column([row.top_p for row in rows], torch.float32),
        min_p=column([row.min_p for row in rows], torch.float32),
        seed=column([row.seed for row in rows], torch.int64),
    )


def positions(rows: list[Row]) -> Tensor:
    return torch.tensor([row.position for row in rows])


def sample_rows(logits: Tensor, rows: list[Row]) -> Tensor:
    return sample(logits, columns(rows), positions(rows))


def reference(logits: list[float], row: Row) -> np.ndarray:
    """Apply temperature, top_k, top_p to the rest, and min_p, token by token in float64."""
    best = max(logits)
    weights = [math.exp((logit - best) / row.temperature) for logit in logits]
    kept = sorted((weight for weight in weights if weight > 0), reverse=True)
    if row.top_k:
        kept = [weight for weight in kept if weight >= kept[: row.top_k][-1]]
    if row.top_p < 1:
        total, mass, nucleus = math.fsum(kept), 0.0, []
        for weight in kept:
            if nucleus and mass >= row.top_p * total and weight != nucleus[-1]:
                break
            nucleus.append(weight)
            mass += weight
        kept = nucleus
    kept = [weight for weight in kept if weight >= row.min_p * kept[0]]
    masked = np.array([weight if weight >= kept[-1] else 0.0 for weight in weights])
    return masked / masked.sum()


def normalized(logits: Tensor, rows: list[Row]) -> np.ndarray:
    probs = sampling_probs(logits, columns(rows)).double().numpy()
    return probs / probs.sum(-1, keepdims=True)


def assert_equals_reference(logits: Tensor, rows: list[Row]) -> None:
    """The same tokens are kept with their exact probabilities, for rows in a batch and alone."""
    together = normalized(logits, rows)
    for i, row in enumerate(rows):
        want = reference(logits[i].tolist(), row)
        for got in (together[i], normalized(logits[i : i + 1], [row])[0]):
            is_wrong = ((got > 0) != (want > 0)) & ((want == 0) | (want > SMALLEST))
            assert not is_wrong.any(), (row, (got > 0).sum(), (want > 0).sum())
            np.testing.assert_allclose(got, want, rtol=3e-5, atol=SMALLEST, err_msg=str(row))


def probs_as_logits(probs: list[float]) -> Tensor:
    return torch.tensor([probs], dtype=torch.float64).log().float()


def random_row(rng: np.random.Generator) -> Row:
    return Row(
        temperature=float(rng.choice([0.3, 1.0, 2.5])),
        top_k=int(rng.choice([0, 1, 2, 7, 40, 500, 1024, 1025, 10**6])),
        top_p=float(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])),
        min_p=float(rng.choice([0.0, 0.0, 0.01, 0.3, 1.0])),
    )


VOCABULARIES = [1, 7, NUM_CANDIDATES - 1, NUM_CANDIDATES, NUM_CANDIDATES + 1, 3 * NUM_CANDIDATES]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("scale", [0.05, 3.0, 30.0], ids=["flat", "usual", "peaked"])
def test_probs_equal_the_reference(vocab_size: int, scale: float) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.standard_normal((24, vocab_size)) * scale).float()
    assert_equals_reference(logits, [random_row(rng) for _ in range(24)])


@pytest.mark.parametrize("vocab_size", [40, 3 * NUM_CANDIDATES])
def test_ties_are_kept_by_value(vocab_size: int) -> None:
    """With few distinct logits, most cuts fall among equal ones, which are kept or cut together."""
    rng = np.random.default_rng(0)
    for num_levels in (1, 2, 5):
        logits = torch.from_numpy(rng.integers(0, num_levels, (24, vocab_size))).float()
        assert_equals_reference(logits, [random_row(rng) for _ in range(24)])


def test_ties_beyond_the_candidates_count_for_top_p() -> None:
    """All tokens that tie with the top_k-th one are passed to top_p, also beyond the candidates."""
    vocab_size = 3 * NUM_CANDIDATES
    probs = [0.2 / 100] * 100 + [0.8 / (vocab_size - 100)] * (vocab_size - 100)
    for top_p in (0.15, 0.25, 0.43, 0.6):
        assert_equals_reference(probs_as_logits(probs), [Row(top_k=500, top_p=top_p)])


@pytest.mark.parametrize("vocab_size", [40, 3 * NUM_CANDIDATES])
def test_excluded_logits_stay_excluded(vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((24, vocab_size)) * 3).float()
    logits[torch.from_numpy(rng.random((24, vocab_size)) < 0.9)] = -INF
    logits[:, 5] = 0.0  # one token is always possible
    logits[0] = -INF
    logits[0, 5] = 0.0  # here it is the only one
    rows = [Row(), *(random_row(rng) for _ in range(23))]
    assert_equals_reference(logits, rows)
    assert normalized(logits, rows)[0, 5] == 1.0


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.05, [0.4]),
        (0.39, [0.4]),
        (0.41, [0.3, 0.4]),
        (0.6, [0.3, 0.4]),
        (0.69, [0.3, 0.4]),
        (0.71, [0.2, 0.3, 0.4]),
        (0.95, [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_the_token_that_crosses_top_p_is_kept(top_p: float, kept: list[float]) -> None:
    probs = [0.1, 0.2, 0.3, 0.4]
    got = normalized(probs_as_logits(probs), [Row(top_p=top_p)])[0]
    want = [p / sum(kept) if p in kept else 0.0 for p in probs]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_top_p_counts_what_top_k_left() -> None:
    logits = probs_as_logits([0.1, 0.2, 0.3, 0.4])
    got = normalized(logits, [Row(top_k=2, top_p=0.5)])[0]  # 0.4 of 0.7 is 57%
    np.testing.assert_allclose(got, [0, 0, 0, 1], atol=1e-6)


def test_min_p_is_relative_to_the_best() -> None:
    got = normalized(probs_as_logits([0.1, 0.2, 0.3, 0.4]), [Row(min_p=0.6)])[0]
    np.testing.assert_allclose(got, [0, 0, 3 / 7, 4 / 7], atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_tiny_temperature_is_the_argmax(temperature: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 300, generator=generator) * scale
    logits[:, 7] = -INF
    got = normalized(logits, [Row(temperature)] * 8)
    assert (got.argmax(-1) == logits.argmax(-1).numpy()).all()
    assert (got.max(-1) == 1.0).all()


def test_bfloat16_logits_are_not_rounded_again() -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = [Row(top_k=50), Row(top_p=0.8), Row(min_p=0.1), Row(0.5)]
    assert (normalized(logits, rows) == normalized(logits.float(), rows)).all()


def test_a_rows_probs_do_not_depend_on_the_batch() -> None:
    """This also holds when another row forces a sort of the whole vocabulary."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((32, 3 * NUM_CANDIDATES)) * 4).float()
    rows = [random_row(rng) for _ in range(32)]
    together = sampling_probs(logits, columns(rows))
    for i, row in enumerate(rows):
        alone = sampling_probs(logits[i : i + 1], columns([row]))
        assert torch.equal(alone[0], together[i]), row


def test_a_cut_at_the_rounding_of_top_p_does_not_depend_on_the_batch() -> None:
    """Use two levels of probability whose border equals top_p up to float32 rounding."""
    logits = torch.full((1, 2048), -INF)
    neighbor = torch.zeros(1, 2048)  # flat: its cut is beyond the candidates
    num_compared = 0
    for step in range(200):
        logits[0, :300], logits[0, 300:600] = 0.0, -1.0 - step / 997
        mass = torch.softmax(logits, -1)[0, :300].double().sum()
        for top_p in (mass.float(), torch.nextafter(mass.float(), torch.tensor(0.0))):
            row = Row(top_p=float(top_p))
            alone = sampling_probs(logits, columns([row]))
            both = torch.cat((logits, neighbor))
            together = sampling_probs(both, columns([row, Row(top_p=0.9)]))
            assert torch.equal(alone[0], together[0]), (step, float(top_p))
            num_compared += 1
    assert num_compared == 400


def chi_square(counts: np.ndarray, probs: np.ndarray) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom; rare tokens share one bin."""
    num_draws, is_common = counts.sum(), probs * counts.sum() >= 10
    observed = np.append(counts[is_common], counts[~is_common].sum())
    expected = np.append(probs[is_common], probs[~is_common].sum()) * num_draws
    is_used = expected > 0
    assert observed[~is_used].sum() == 0, "drew a token of probability 0"
    statistic = ((observed[is_used] - expected[is_used]) ** 2 / expected[is_used]).sum()
    return float(statistic), int(is_used.sum()) - 1


def chi_square_limit(degrees: int) -> float:
    """Return the statistic that is exceeded with probability 1e-5 (Wilson-Hilferty)."""
    z, spread = 4.265, 2 / (9 * degrees)
    return degrees * (1 - spread + z * spread**0.5) ** 3


DRAWN = pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(temperature=0.4),
        Row(temperature=3.0, top_k=12),
        Row(top_p=0.8),
        Row(min_p=0.05),
        Row(temperature=2.0, top_k=30, top_p=0.9, min_p=0.1),
    ],
    ids=str,
)


@DRAWN
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_draws_follow_the_exact_probabilities(row: Row, varied: str) -> None:
    num_draws = 20_000
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(5)) * 2
    probs = reference(logits[0].tolist(), row)
    rows = [row._replace(**{varied: i}) for i in range(num_draws)]
    tokens = sample_rows(logits.expand(num_draws, -1), rows).numpy()
    counts = np.bincount(tokens, minlength=50)
    assert counts[probs == 0].sum() == 0
    statistic, degrees = chi_square(counts, probs)
    assert degrees >= 4
    assert statistic < chi_square_limit(degrees)


def test_chi_square_notices_a_wrong_distribution() -> None:
    probs = reference([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], Row())
    wrong = reference([0.0, 0.1, 0.2, 0.3, 0.4, 0.7], Row())
    statistic, degrees = chi_square((wrong * 20_000).round(), probs)
    assert statistic > chi_square_limit(degrees)


def mixed_batch(num_rows: int, vocab_size: int) -> tuple[Tensor, list[Row]]:
    rng = np.random.default_rng(7)
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size)) * 2).float()
    rows = [
        random_row(rng)._replace(seed=int(rng.integers(-(2**63), 2**63 - 1)), position=i * 37)
        for i in range(num_rows)
    ]
    return logits, [row if i % 3 else row._replace(temperature=0.0) for i, row in enumerate(rows)]


@pytest.mark.parametrize("vocab_size", [200, 2 * NUM_CANDIDATES])
def test_a_token_does_not_depend_on_the_batch(vocab_size: int) -> None:
    logits, rows = mixed_batch(48, vocab_size)
    together = sample_rows(logits, rows).tolist()
    alone = [sample_rows(logits[i : i + 1], [row]).item() for i, row in enumerate(rows)]
    assert alone == together
    order = np.random.default_rng(0).permutation(48)
    shuffled = sample_rows(logits[order], [rows[i] for i in order])
    assert shuffled.tolist() == [together[i] for i in order]
    half = sample_rows(logits[::2], rows[::2])
    assert half.tolist() == together[::2]


def test_greedy_rows_take_the_argmax_whatever_their_neighbors() -> None:
    logits, rows = mixed_batch(48, 200)
    tokens = sample_rows(logits, rows)
    greedy = [i for i, row in enumerate(rows) if row.temperature == 0]
    assert len(greedy) == 16
    assert tokens[greedy].tolist() == logits[greedy].argmax(-1).tolist()
    all_greedy = sample_rows(logits, [row._replace(temperature=0.0) for row in rows])
    assert torch.equal(all_greedy[greedy], tokens[greedy])


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 5000)
    logits[1, 4000:] = 1.0
    logits[2, [17, 900, 4999]] = 2.0
    assert sample_rows(logits, [Row(0.0)] * 3).tolist() == [0, 4000, 17]


def test_sampling_leaves_the_logits_alone() -> None:
    logits, rows = mixed_batch(12, 200)
    before = logits.clone()
    sample_rows(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("value", [math.nan, -INF, INF])
@pytest.mark.parametrize("row", [Row(), Row(0.0), Row(top_k=3, top_p=0.9, min_p=0.1)])
def test_a_row_that_is_no_numbers_gives_no_token(value: float, row: Row) -> None:
    """No token is sampled, whether an overflow broke every logit or only one."""
    logits = torch.zeros(3, 64)
    logits[0] = logits[2, 5] = value
    tokens = sample_rows(logits, [row] * 3)
    alone = sample_rows(logits[1:2], [row])
    assert tokens[0].item() == NO_TOKEN
    assert (tokens[2].item() == NO_TOKEN) == (value != -INF)
    assert tokens[1].item() == alone[0].item() >= 0


SEEDS = [0, 1, -1, 12345, 2**63 - 1, -(2**63), 2**62 + 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_is_uniform_over_positions(seed: int) -> None:
    num_draws = 20_000
    position = torch.arange(num_draws)
    assert_uniform(uniform(torch.full_like(position, seed), position).numpy())


@pytest.mark.parametrize("position", [0, 1, 4095, 2**40])
def test_uniform_is_uniform_over_seeds(position: int) -> None:
    seed = torch.arange(-10_000, 10_000)
    assert_uniform(uniform(seed, torch.full_like(seed, position)).numpy())


def assert_uniform(values: np.ndarray) -> None:
    assert values.dtype == np.float64
    assert values.min() >= 0.0
    assert values.max() < 1.0
    for part in (values, np.modf(values * 64)[0], np.modf(values * 2.0**20)[0]):
        counts, _ = np.histogram(part, bins=64, range=(0, 1))
        statistic, degrees = chi_square(counts, np.full(64, 1 / 64))
        assert statistic < chi_square_limit(degrees)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4.5 / len(values) ** 0.5
    assert len(np.unique(values)) == len(values)


def test_streams_of_neighboring_seeds_are_unrelated() -> None:
    """In particular seed s at position p is not seed s + 1 at position p - 1."""
    position = torch.arange(2000)
    streams = np.stack([uniform(torch.full_like(position, seed), position) for seed in range(20)])
    correlations = np.corrcoef(streams) - np.eye(20)
    assert np.abs(correlations).max() < 4.5 / 2000**0.5
    assert len(np.unique(streams)) == streams.size


def test_uniform_equals_splitmix64() -> None:
    def splitmix64(seed: int, position: int) -> float:
        bits = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        return ((bits ^ (bits >> 31)) >> 11) / 2**53

    pairs = [(seed, position) for seed in SEEDS for position in (0, 1, 63, 2**31, 2**62)]
    got = uniform(*torch.tensor(pairs).unbind(1))
    assert got.tolist() == [splitmix64(seed, position) for seed, position in pairs]
