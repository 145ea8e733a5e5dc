"""The sampling kernels equal plain torch, compiled; test_interpreted.py runs them without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.devices.cuda.kernels.sampling import (
    sample_tokens,
    sampling_workspace,
    split_vocabulary,
)
from nanovllm.ops.interface import Sampling
from tests.devices.cuda.kernels.interpreted import sampling_cases as cases
from tests.ops.sampling_by_noise import noise_bits, sample_by_noise
from tests.ops.test_torch_sampling import (
    DRAWN,
    SEEDS,
    Row,
    chi_square,
    chi_square_limit,
    reference,
)

VOCAB_SIZE = 151_936
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 17, 64, 200, 256, 1024, 5000])
@pytest.mark.parametrize("vocab_size", [1, 1024, 1025, 5003, VOCAB_SIZE, 262_144])
def test_splits_cover_the_vocabulary(num_rows: int, vocab_size: int) -> None:
    split = split_vocabulary(num_rows, vocab_size)
    each = split.block * split.num_tiles
    assert each * (split.num_splits - 1) < vocab_size <= each * split.num_splits
    assert split.num_splits <= sampling_workspace(1, vocab_size, "cpu").scores.shape[1]


def noise(seeds: list[int], positions: list[int], vocab_size: int) -> Tensor:
    return noise_bits(torch.tensor(seeds), torch.tensor(positions), vocab_size)


def correlation(x: Tensor, y: Tensor) -> float:
    """Return the correlation in standard deviations of that of independent numbers."""
    pair = torch.stack((x.flatten(), y.flatten())).double()
    return float(torch.corrcoef(pair)[0, 1] * pair.shape[1] ** 0.5)


def test_noise_is_uniform_in_every_byte() -> None:
    bits = noise(SEEDS, [0, 1, 2, 3, 1000, 2**20, 2**31 - 1], 100_000)
    assert bits.min() >= 0
    assert bits.max() < 2**32
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(((bits >> shift) & 255).flatten(), minlength=256).numpy()
        assert chi_square(counts, np.full(256, 1 / 256))[0] < chi_square_limit(255)


def test_neighboring_noise_is_independent() -> None:
    """Noise is independent between ids, positions and seeds: as numbers, and as pairs of digits."""
    over_seeds = noise(list(range(32)), [17] * 32, 20_000)
    over_positions = noise([3] * 32, list(range(32)), 20_000)
    pairs = [(over_seeds[1:], over_seeds[:-1]), (over_positions[1:], over_positions[:-1])]
    pairs += [(over_seeds[:, lag:], over_seeds[:, :-lag]) for lag in (1, 2, 32, 1024, 2048)]
    for x, y in pairs:
        assert abs(correlation(x, y)) < 4.5
        for shift in (0, 27):
            digits = ((x >> shift) & 31) * 32 + ((y >> shift) & 31)
            counts = torch.bincount(digits.flatten(), minlength=1024).numpy()
            assert chi_square(counts, np.full(1024, 1 / 1024))[0] < chi_square_limit(1023)


def test_every_bit_of_a_seed_changes_half_of_the_noise() -> None:
    seeds = [0, *(1 << bit for bit in range(63)), -(2**63)]
    bits = noise(seeds, [5] * 65, 2000)
    changed = [((bits[1:] ^ bits[0]) >> bit) & 1 for bit in range(32)]
    rates = torch.stack([bit.double().mean(-1) for bit in changed])
    assert (rates - 0.5).abs().max() < 5.5 * 0.5 / 2000**0.5
    assert len({tuple(stream[:4].tolist()) for stream in bits}) == 65


def draw(logits: Tensor, row: Row, num_draws: int, varied: str, device: str) -> Tensor:
    """Draw many times from the same logits, which are stored once."""
    rows = [row._replace(**{varied: i}) for i in range(num_draws)]
    batch = cases.make_batch(logits[:, :1].expand(num_draws, 1), rows, device)
    shared = logits.to(device).expand(num_draws, -1)
    if device == "cpu":
        by_row = batch.columns.select(batch.slots.long())
        return sample_by_noise(shared, by_row, batch.context_lens.long())
    out = torch.empty(num_draws, dtype=torch.int32, device=device)
    workspace = sampling_workspace(num_draws, logits.shape[1], device)
    sample_tokens(
        shared, batch.slots, batch.columns, batch.context_lens, cases.FULL, out, workspace
    )
    return out.cpu()


def assert_follows(tokens: Tensor, probs: np.ndarray) -> None:
    counts = np.bincount(tokens.numpy(), minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    statistic, degrees = chi_square(counts, probs)
    assert degrees >= 4
    assert statistic < chi_square_limit(degrees)


@DRAWN
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_draws_follow_the_exact_probabilities(row: Row, varied: str) -> None:
    """Test the reference, whose tokens the kernels draw; a test below runs the kernels."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(5)) * 2
    tokens = draw(logits, row, 20_000, varied, "cpu")
    assert_follows(tokens, reference(logits[0].tolist(), row))


@pytest.mark.slow
def test_many_equal_tokens_are_drawn_equally_often() -> None:
    """The winner among many has a tiny uniform number, whose rounding must not favor low ids."""
    tokens = draw(torch.zeros(1, 20_000), Row(), 500, "seed", "cpu")
    counts = np.bincount(tokens.numpy() // 1000, minlength=20)
    assert chi_square(counts, np.full(20, 1 / 20))[0] < chi_square_limit(19)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("kind", cases.KINDS)
def test_full_natively(kind: str, dtype: torch.dtype) -> None:
    logits = cases.KINDS[kind](32, VOCAB_SIZE).to(dtype)
    cases.check_full(cases.make_batch(logits, cases.make_rows(32, 0), "cuda"), max_different=3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 9, 40])
@pytest.mark.parametrize("asked", [cases.GREEDY, cases.NOISE, cases.MIN_P])
def test_what_is_asked_for_natively(asked: Sampling, num_rows: int) -> None:
    cases.check_asked(asked, VOCAB_SIZE, num_rows, "cuda")


@pytest.mark.gpu
def test_the_other_cases_natively() -> None:
    cases.check_more_than_asked(40, VOCAB_SIZE, "cuda")
    cases.check_company(40, VOCAB_SIZE, "cuda")
    cases.check_splits(5003, "cuda")
    cases.check_both_searches(torch.bfloat16, "cuda")
    cases.check_both_searches(torch.float32, "cuda")
    cases.check_broken_rows("cuda")
    cases.check_tiny_temperatures("cuda")
    cases.check_noise_counters("cuda")
    cases.check_advance("cuda")
    cases.check_sampled_tokens_are_appended("cuda")
    cases.check_no_rows("cuda")


@pytest.mark.gpu
@DTYPES
@DRAWN
def test_draws_follow_the_exact_probabilities_natively(row: Row, dtype: torch.dtype) -> None:
    """Forty likely tokens among a whole vocabulary of unlikely ones."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.full((1, VOCAB_SIZE), -14.0)
    places = torch.randperm(VOCAB_SIZE, generator=generator)[:40]
    logits[0, places] = torch.randn(40, generator=generator)
    logits = logits.to(dtype)
    tokens = draw(logits, row, 8000, "position", "cuda")
    assert_follows(tokens, reference(logits[0].tolist(), row))


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("asked", cases.ASKED)
def test_graphs_natively(asked: Sampling, dtype: torch.dtype) -> None:
    """A captured step draws the same tokens as an eager one for new logits, and advances."""
    num_rows = 24
    logits = cases.random_logits(4 * num_rows, VOCAB_SIZE, 3.0).to(dtype).cuda().split(num_rows)
    rows = [row._replace(position=0) for row in cases.make_rows(num_rows, 1)]
    batch = cases.make_batch(logits[0], rows, "cuda")
    workspace = sampling_workspace(num_rows, VOCAB_SIZE, "cuda")
    out = torch.empty(num_rows, dtype=torch.int32, device="cuda")
    tokens = torch.zeros(num_rows + 4, 16, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(num_rows + 4, dtype=torch.int32, device="cuda")

    def step() -> None:
        arguments = batch.logits, batch.slots, batch.columns, batch.context_lens
        sample_tokens(*arguments, asked, out, workspace, tokens, lengths)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    lengths.zero_()
    drawn = []
    for values in logits:
        batch.logits.copy_(values)
        batch.context_lens.add_(1)
        graph.replay()
        drawn.append(out.clone())
        assert torch.equal(out, cases.run(batch, asked)[0])
    assert torch.equal(tokens[batch.slots.long(), 1:5].T, torch.stack(drawn))
    assert lengths[batch.slots.long()].tolist() == [5] * num_rows
