"""Checks of the sampling kernels that run on any device; as a script, in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.interpreted tests.devices.cuda.kernels.interpreted.sampling_cases
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from nanovllm.devices.cuda.kernels import masks, sampling
from nanovllm.devices.cuda.kernels import token_logprobs as logprobs
from nanovllm.devices.cuda.kernels.sampling import (
    SamplingWorkspace,
    Split,
    advance,
    sample_tokens,
    sampling_workspace,
)
from nanovllm.ops import torch_logits
from nanovllm.ops.interface import Sampling
from nanovllm.ops.torch_sampling import SamplingColumns, sampling_probs
from nanovllm.sampling_params import NO_TOKEN
from tests.ops.sampling_by_noise import sample_by_noise
from tests.ops.test_torch_sampling import SMALLEST, Row, columns, random_row

INF = torch.inf
GREEDY, NOISE, MIN_P = Sampling.GREEDY, Sampling.RANDOM, Sampling.RANDOM | Sampling.MIN_P
TOP, FULL = Sampling.RANDOM | Sampling.TOP_K_TOP_P, MIN_P | Sampling.TOP_K_TOP_P
ASKED = GREEDY, NOISE, MIN_P, TOP, FULL


@dataclass(frozen=True, slots=True)
class Batch:
    rows: list[Row]
    logits: Tensor
    slots: Tensor
    context_lens: Tensor
    columns: SamplingColumns


def make_batch(logits: Tensor, rows: list[Row], device: str) -> Batch:
    """Spread the rows over the slots of larger tables; the logits are part of a wider buffer."""
    num_slots = len(rows) + 3
    slots = np.random.default_rng(0).permutation(num_slots)[: len(rows)]
    filler = Row(temperature=0.7, top_k=3, top_p=0.5, min_p=0.5)
    by_slot = [filler] * num_slots
    for slot, row in zip(slots, rows, strict=True):
        by_slot[slot] = row
    table = columns(by_slot)
    wide = torch.full((len(rows), logits.shape[1] + 16), 99.0, dtype=logits.dtype, device=device)
    wide[:, : logits.shape[1]] = logits
    on_device = SamplingColumns(*(getattr(table, name).to(device) for name in table.__slots__))
    return Batch(
        rows,
        wide[:, : logits.shape[1]],
        torch.from_numpy(slots).int().to(device),
        torch.tensor([row.position for row in rows], dtype=torch.int32, device=device),
        on_device,
    )


def run(batch: Batch, asked: Sampling) -> tuple[Tensor, SamplingWorkspace]:
    """Sample with a workspace that is larger than needed, and holds data of another call."""
    num_rows, vocab_size = batch.logits.shape
    workspace = sampling_workspace(num_rows + 1, vocab_size, batch.logits.device)
    for name in workspace.__slots__:
        getattr(workspace, name).fill_(77)
    out = torch.full((num_rows,), -1, dtype=torch.int32, device=batch.logits.device)
    arguments = batch.logits, batch.slots, batch.columns, batch.context_lens
    sample_tokens(*arguments, asked, out, workspace)
    return out, workspace


def expected(batch: Batch) -> Tensor:
    by_row = batch.columns.select(batch.slots.long())
    return sample_by_noise(batch.logits, by_row, batch.context_lens.long()).int()


def make_rows(num_rows: int, seed: int) -> list[Row]:
    """Return rows of every kind that a batch can mix, including greedy ones."""
    rng = np.random.default_rng(seed)
    rows = [
        random_row(rng)._replace(
            seed=int(rng.integers(-(2**63), 2**63 - 1)), position=int(rng.integers(40_000))
        )
        for _ in range(num_rows)
    ]
    return [row._replace(temperature=0.0) if i % 5 == 4 else row for i, row in enumerate(rows)]


def without_cuts(row: Row) -> Row:
    return row._replace(top_k=0, top_p=1.0, min_p=0.0)


def random_logits(num_rows: int, vocab_size: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def masked_logits(num_rows: int, vocab_size: int, value: float) -> Tensor:
    logits = random_logits(num_rows, vocab_size, 3.0)
    is_masked = random_logits(num_rows, vocab_size, 1.0) < 1.3
    is_masked[:, vocab_size // 2] = False
    return logits.masked_fill(is_masked, value)


def tied_logits(num_rows: int, vocab_size: int, num_levels: int) -> Tensor:
    return (random_logits(num_rows, vocab_size, 1e3).round() % num_levels).abs()


def dominated_logits(num_rows: int, vocab_size: int) -> Tensor:
    logits = random_logits(num_rows, vocab_size, 1.0)
    logits[:, vocab_size // 3] = 40.0
    return logits


KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "flat": partial(random_logits, scale=0.05),
    "usual": partial(random_logits, scale=3.0),
    "peaked": partial(random_logits, scale=30.0),
    "huge": partial(random_logits, scale=1e4),
    "tied": partial(tied_logits, num_levels=4),
    "equal": partial(tied_logits, num_levels=1),
    "masked": partial(masked_logits, value=-INF),
    "penalised": partial(masked_logits, value=-1e4),
    "dominated": dominated_logits,
}


def check_full(batch: Batch, max_different: int = 0) -> SamplingWorkspace:
    """Tokens and kept sets equal those of plain torch, in nearly all rows.

    On a GPU, rounding may rarely decide whether a token is within top_p.
    """
    tokens, workspace = run(batch, FULL)
    assert int((tokens != expected(batch)).sum()) <= max_different
    thresholds = workspace.thresholds[: len(tokens)]
    by_row = batch.columns.select(batch.slots.long())
    temperature, min_p = by_row.temperature, by_row.min_p
    logits = batch.logits.float()
    rows = [row if row.temperature else Row() for row in batch.rows]
    shifted = logits - logits.amax(-1, keepdim=True)
    probs = torch.softmax(shifted.cpu() / columns(rows).temperature[:, None], -1)
    is_counted = (probs > SMALLEST) & torch.tensor([[row.temperature > 0] for row in batch.rows])

    kept = logits >= thresholds[:, None]
    kept &= (shifted >= (temperature * min_p.log())[:, None]) | (min_p == 0)[:, None]
    right = sampling_probs(batch.logits.cpu(), columns(rows)) > 0
    assert int(((kept.cpu() != right) & is_counted).any(-1).sum()) <= max_different
    return workspace


def check_kind(kind: str, vocab_size: int, num_rows: int, dtype: torch.dtype, device: str) -> None:
    logits = KINDS[kind](num_rows, vocab_size).to(dtype)
    check_full(make_batch(logits, make_rows(num_rows, vocab_size), device))


def rows_that_ask(asked: Sampling, num_rows: int, seed: int) -> list[Row]:
    """Return rows that need only this kind of sampling."""
    rows = make_rows(num_rows, seed)
    if Sampling.TOP_K_TOP_P not in asked:
        rows = [row._replace(top_k=0, top_p=1.0) for row in rows]
    if Sampling.MIN_P not in asked:
        rows = [row._replace(min_p=0.0) for row in rows]
    if Sampling.RANDOM not in asked:
        rows = [row._replace(temperature=0.0) for row in rows]
    return rows


def check_asked(asked: Sampling, vocab_size: int, num_rows: int, device: str) -> None:
    """Rows that need only this kind of sampling get the reference's tokens."""
    rows = rows_that_ask(asked, num_rows, 2)
    logits = tied_logits(num_rows, vocab_size, 200)  # greedy rows have ties
    batch = make_batch(logits, rows, device)
    tokens = run(batch, asked)[0]
    assert torch.equal(tokens, expected(batch))
    greedy = [i for i, row in enumerate(rows) if row.temperature == 0]
    assert tokens[greedy].tolist() == logits[greedy].max(-1).indices.tolist()


def check_more_than_asked(num_rows: int, vocab_size: int, device: str) -> None:
    """Other rows of the batch determine `asked`, which must not change the tokens."""
    logits = random_logits(num_rows, vocab_size, 3.0)
    for asked in ASKED:
        batch = make_batch(logits, rows_that_ask(asked, num_rows, 3), device)
        tokens = [run(batch, more)[0] for more in ASKED if asked in more]
        assert all(torch.equal(tokens[0], other) for other in tokens[1:])


def check_company(num_rows: int, vocab_size: int, device: str) -> None:
    """A row alone gets the same token as in a batch, where it is split over CTAs differently."""
    logits, rows = random_logits(num_rows, vocab_size, 3.0), make_rows(num_rows, 4)
    together = run(make_batch(logits, rows, device), FULL)[0].tolist()
    for i in range(0, num_rows, 3):
        alone = run(make_batch(logits[i : i + 1], rows[i : i + 1], device), FULL)[0]
        assert alone.item() == together[i], rows[i]


def check_splits(vocab_size: int, device: str) -> None:
    """Tokens and thresholds are bitwise equal, however a row is split."""
    rows = [Row(2.0, top_p=0.9, seed=5), Row(1.0, top_k=900, top_p=0.99, seed=6), Row(0.0)]
    logits = random_logits(3, vocab_size, 0.5)
    logits[2] = 0.0  # all ties: the first id wins, whichever CTA finds it
    batch = make_batch(logits, rows, device)
    wanted, thresholds = expected(batch).tolist(), set()
    for split in (Split(1024, 1, 5), Split(1024, 2, 3), Split(2048, 3, 1)):
        with patch.object(sampling, "split_vocabulary", lambda *sizes, split=split: split):
            tokens, workspace = run(batch, FULL)
        assert tokens.tolist() == wanted
        thresholds.add(tuple(workspace.thresholds[:3].tolist()))
    assert len(thresholds) == 1


def check_both_searches(dtype: torch.dtype, device: str) -> None:
    """The threshold is among the candidates or beyond them, with many ties, or with few tokens."""
    vocab_size = 5003
    rows = [Row(top_k=20), Row(top_k=4000), Row(0.1, top_p=0.5), Row(100.0, top_p=0.9)]
    rows += [Row(top_k=9), Row(top_k=600), Row(top_k=600)]
    logits = random_logits(7, vocab_size, 2.0)
    logits[4] = 1.5
    logits[5, 400:] = -INF
    logits[6, torch.arange(vocab_size) % 12 > 0] = -INF
    batch = make_batch(logits.to(dtype), rows, device)
    counts = check_full(batch).num_candidates.tolist()
    assert 20 <= counts[0] < 4000
    assert 20 <= counts[1] < 4000
    assert counts[4] == vocab_size > sampling.CAPACITY
    assert counts[5] == 400
    assert counts[6] < 400


def check_broken_rows(device: str) -> None:
    """Rows with NaN or infinity give no token; other rows are not affected."""
    logits = random_logits(7, 1500, 2.0)
    broken = logits.clone()
    broken[0], broken[2], broken[4] = torch.nan, -INF, INF
    broken[5, 1400], broken[6, 7] = torch.nan, INF
    cases: tuple[tuple[Sampling, Row], ...] = (
        (GREEDY, Row(0.0)),
        (NOISE, Row()),
        (MIN_P, Row(min_p=0.1)),
        (TOP, Row(top_k=3, top_p=0.9)),
        (FULL, Row(top_k=3, top_p=0.9, min_p=0.1)),
        (FULL, Row()),
        (FULL, Row(0.0)),
    )
    for asked, row in cases:
        whole = run(make_batch(logits, [row] * 7, device), asked)[0]
        tokens = run(make_batch(broken, [row] * 7, device), asked)[0]
        assert tokens[[0, 2, 4, 5, 6]].tolist() == [NO_TOKEN] * 5
        assert tokens[[1, 3]].tolist() == whole[[1, 3]].tolist()
        assert tokens[[1, 3]].min() >= 0


def check_tiny_temperatures(device: str) -> None:
    for scale in (1.0, 1e4):
        logits = random_logits(4, 300, scale)
        logits[:, 7] = -INF
        rows = [Row(1e-6), Row(1e-30), Row(1e-30, top_k=5, top_p=0.9), Row(1e-20, min_p=0.5)]
        tokens = run(make_batch(logits, rows, device), FULL)[0]
        assert tokens.tolist() == logits.argmax(-1).tolist()


def check_noise_counters(device: str) -> None:
    """The kernel's draws depend on seed, position and id like the reference's."""
    rows = [Row(seed=s, position=p) for s in (0, 1, -1, 2**63 - 1, -(2**63)) for p in (0, 1, 65536)]
    batch = make_batch(torch.zeros(len(rows), 1000), rows, device)
    tokens = run(batch, NOISE)[0]
    assert torch.equal(tokens, expected(batch))
    assert len(set(tokens.tolist())) > 12


def check_advance(device: str) -> None:
    """Tokens are stored after their contexts; full slots and the padding slot do not change."""
    width, num_lines = 8, 7
    tokens = torch.full((num_lines, width), -1, dtype=torch.int32, device=device)
    lengths = torch.tensor([0, 3, 7, 8, 2, 5, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([5, 0, 2, 3, 6, 6, 6], dtype=torch.int32, device=device)
    out = torch.arange(10, 17, dtype=torch.int32, device=device)
    out[1] = NO_TOKEN  # stored as token 0, which has an embedding
    wanted = tokens.clone()
    wanted[5, 5], wanted[0, 0], wanted[2, 7] = 10, 0, 12
    advance(out, slots, lengths[slots.long()], tokens, lengths)
    assert torch.equal(tokens, wanted)
    assert lengths.tolist() == [1, 3, 8, 8, 2, 6, 0]
    drafts = torch.tensor([1, 1], dtype=torch.int32, device=device)  # two rows of a slot
    advance(out[2:4], drafts, drafts + torch.arange(2, device=device).int(), tokens, lengths)
    wanted[1, 1], wanted[1, 2] = 12, 13
    assert torch.equal(tokens, wanted)
    advance(out[:0], slots[:0], slots[:0], tokens, lengths)
    assert torch.equal(tokens, wanted)


def check_sampled_tokens_are_appended(device: str) -> None:
    """Sampling appends tokens like `advance`, also NO_TOKEN, and copies them to the host."""
    logits = random_logits(4, 300, 3.0)
    logits[2] = torch.nan
    rows = [row._replace(position=3) for row in make_rows(4, seed=1)]
    batch = make_batch(logits, rows, device)
    num_slots = int(batch.slots.max()) + 2  # the last slot is padding
    tables = [
        (torch.zeros(num_slots, 8, dtype=torch.int32, device=device), lengths)
        for lengths in torch.full((2, num_slots), 3, dtype=torch.int32, device=device)
    ]
    out, workspace = run(batch, FULL)
    advance(out, batch.slots, batch.context_lens, *tables[0])
    arguments = batch.logits, batch.slots, batch.columns, batch.context_lens
    host = torch.zeros(len(out), dtype=torch.int32, pin_memory=device == "cuda")
    sample_tokens(*arguments, FULL, torch.empty_like(out), workspace, *tables[1], host)
    assert out.tolist() == host.tolist()  # out.tolist() waits for the device
    for appended, wanted in zip(*tables, strict=True):
        assert torch.equal(appended, wanted)
    assert tables[1][1].sum() == 3 * num_slots + 4


def check_no_rows(device: str) -> None:
    batch = make_batch(torch.zeros(1, 40), [Row()], device)
    empty = replace(batch, logits=batch.logits[:0], slots=batch.slots[:0])
    assert run(empty, FULL)[0].tolist() == []


FLOAT16, FLOAT32 = torch.float16, torch.float32


def check_logprobs(vocab_size: int, num_top: int, dtype: torch.dtype, device: str) -> None:
    """Logprobs equal the reference's, even if a whole block of logits is minus infinity."""
    logits = KINDS["usual"](5, vocab_size).to(dtype).to(device)
    logits[1, 4096:8200] = logits[2, ::3] = -torch.inf
    tokens = torch.tensor([0, 1, vocab_size - 1, 7, 2], dtype=torch.int32, device=device)
    ids, values, ranks = logprobs.token_logprobs(logits, tokens, num_top)
    _, right, right_ranks = torch_logits.token_logprobs(logits, tokens, num_top)
    torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5)
    assert ranks.tolist() == right_ranks.tolist()
    own = logits.double().log_softmax(-1).gather(1, ids.long())
    torch.testing.assert_close(values.double(), own, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == len(row) for row in ids[:, 1:].tolist())


def check_masks(vocab_size: int, dtype: torch.dtype, device: str) -> None:
    """Bitmasks for all rows and for some; the last word extends beyond the vocabulary."""
    logits = KINDS["usual"](5, vocab_size).to(dtype).to(device)
    shape = (5, -(-vocab_size // 32))
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
    words[0], words[1] = -1, 0
    for rows in (None, torch.tensor([3, 0, 1], device=device)):
        some = words if rows is None else words[:3]
        right, got = logits.clone(), logits.clone()
        torch_logits.apply_token_bitmask(right, rows, some)
        masks.apply_token_bitmask(got, rows, some)
        assert torch.equal(got, right)
        assert right.isinf().sum() > vocab_size
    slots = torch.tensor([2, 0, 1, *[9] * (len(logits) - 3)], device=device, dtype=torch.int32)
    right, got = logits.clone(), logits.clone()
    torch_logits.apply_token_bitmask(right, torch.arange(3, device=device), words[:3])
    masks.apply_token_bitmask(got, None, words[:3], slots, 9)
    assert torch.equal(got, right)


CASES: list[partial[None]] = [
    *(
        partial(check_kind, kind, 1000, 5, FLOAT32 if i % 2 else FLOAT16, "cpu")
        for i, kind in enumerate(KINDS)
    ),
    partial(check_kind, "usual", 1000, 4, torch.bfloat16, "cpu"),
    partial(check_kind, "flat", 1000, 4, FLOAT32, "cpu"),
    partial(check_kind, "peaked", 5003, 3, FLOAT16, "cpu"),
    partial(check_kind, "masked", 5003, 2, FLOAT16, "cpu"),
    partial(check_kind, "usual", 1, 2, FLOAT32, "cpu"),
    partial(check_kind, "usual", 7, 9, FLOAT16, "cpu"),
    *(partial(check_asked, asked, 5003, 3, "cpu") for asked in (GREEDY, NOISE, MIN_P, TOP)),
    *(partial(check_asked, asked, 7, 1, "cpu") for asked in (GREEDY, NOISE, MIN_P, TOP)),
    partial(check_company, 5, 300, "cpu"),
    partial(check_tiny_temperatures, "cpu"),
    partial(check_noise_counters, "cpu"),
    partial(check_advance, "cpu"),
    partial(check_sampled_tokens_are_appended, "cpu"),
    partial(check_no_rows, "cpu"),
    partial(check_logprobs, 9001, 5, FLOAT32, "cpu"),
    partial(check_logprobs, 9001, 0, FLOAT16, "cpu"),
    partial(check_logprobs, 160, 20, torch.bfloat16, "cpu"),
    partial(check_masks, 5003, torch.bfloat16, "cpu"),
    partial(check_masks, 64, FLOAT32, "cpu"),
]
LONG_CASES: list[partial[None]] = [
    partial(check_both_searches, torch.bfloat16, "cpu"),
    partial(check_more_than_asked, 4, 300, "cpu"),
    partial(check_splits, 5003, "cpu"),
    partial(check_broken_rows, "cpu"),
]


def main(which: str) -> None:
    kinds = [case for case in CASES if case.func is check_kind]
    others = [case for case in CASES if case.func is not check_kind]
    some = kinds[::3]
    rest = [case for case in kinds if case not in some]
    for case in some + others if which == "some" else rest + LONG_CASES:
        print(f"{case.func.__name__}{case.args}", flush=True)
        start = time.process_time()
        case()
        print(f"    {time.process_time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
