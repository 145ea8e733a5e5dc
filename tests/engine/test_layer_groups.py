"""Groups of layers: windows free their blocks, and prefix hits hold for all groups."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest

from benchmarks.engine.scheduler_cost import InstantExecutor
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.executor import StateCounts, Windows
from nanovllm.engine.feature import Feature
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.states.state_pool import StatePool
from nanovllm.sampling_params import SamplingParams

PLAIN: Windows = (None,)
GEMMA_3: Windows = (None, *[1024] * 6)
CHUNK = 16_384


def make_core(
    windows: Windows,
    num_blocks: int,
    block_size: int = 64,
    num_snapshots: int | None = None,
    chunk: int = CHUNK,
    num_slots: int = 8,
) -> EngineCore:
    blocks = BlockManager(num_blocks, block_size, True, windows)
    features: list[Feature] = []
    if num_snapshots is not None:
        features.append(StatePool(StateCounts(num_slots, num_snapshots), blocks))
    scheduler = Scheduler(blocks, num_slots, chunk, features)
    return EngineCore(scheduler, InstantExecutor(), depth=0, max_model_len=1 << 20)


def steps(core: EngineCore, seq_id: int, prompt: list[int], max_tokens: int) -> Iterator[Sequence]:
    """Run one request; yield its sequence after every step."""
    core.add(Request(seq_id, array("i", prompt), SamplingParams(max_tokens=max_tokens)))
    seq = core._sequences[seq_id]
    while core.has_unfinished:
        core.step()
        yield seq


def run(core: EngineCore, seq_id: int, prompt: list[int], max_tokens: int = 1) -> Sequence:
    """Run one request; return its sequence."""
    *_, seq = steps(core, seq_id, prompt, max_tokens)
    return seq


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(1000), k=count)


@pytest.mark.parametrize(("block_size", "chunk", "length"), [(16, 256, 3000), (64, CHUNK, 100_000)])
@pytest.mark.parametrize("windows", [(64,), (None, 64)])
def test_a_window_holds_no_more_than_it_needs(
    windows: Windows, block_size: int, chunk: int, length: int
) -> None:
    """It holds its own length, one chunk, and two blocks; the rest of the pool stays free."""
    core = make_core(windows, 8 * length // block_size, block_size, chunk=chunk)
    most = 0
    for seq in steps(core, 0, [7] * (length - 300), 300):
        if seq.tables:
            core.scheduler.blocks.check([seq])
            most = max(most, len(seq.tables[-1].held_block_ids))
    assert len(seq.token_ids) == length
    assert most * block_size <= 64 + chunk + 2 * block_size
    assert core.scheduler.blocks.num_free == core.scheduler.blocks.num_blocks


@pytest.mark.parametrize("windows", [PLAIN, GEMMA_3, (64,), (None, 100, 700)])
@pytest.mark.parametrize("length", [64, 65, 1000, 1024, 5000])
def test_the_same_prompt_hits_all_its_full_blocks(windows: Windows, length: int) -> None:
    core, prompt = make_core(windows, 4000), random_tokens(random.Random(length), length)
    run(core, 0, prompt, 500)
    assert run(core, 1, prompt, 500).num_cached == (length - 1) // 64 * 64
    seq = run(core, 2, [*prompt, 5], 500)  # the first output token
    assert seq.num_cached == length // 64 * 64


@pytest.mark.parametrize("windows", [PLAIN, GEMMA_3, (4096,)])
@pytest.mark.parametrize("num_snapshots", [None, 100])
def test_prompts_that_share_their_first_tokens(windows: Windows, num_snapshots: int | None) -> None:
    """With recurrent states, the second prompt finds the branch, and takes a snapshot there."""
    core, rng = make_core(windows, 20_000, num_snapshots=num_snapshots), random.Random(0)
    shared = random_tokens(rng, 1600)
    hits = [run(core, i, shared + random_tokens(rng, 600)).num_cached for i in range(64)]
    second = 1600 if num_snapshots is None else 1024
    assert hits == [0, second, *[1600] * 62]


def test_the_blocks_before_a_branch_are_kept() -> None:
    """Two long prompts between those with the shared tokens reuse what windows have passed."""
    core, rng = make_core(GEMMA_3, 1000, chunk=512), random.Random(0)
    shared, num_cached = random_tokens(rng, 1600), 0
    for seq_id in range(0, 60, 3):
        prompt = shared + random_tokens(rng, 600)
        num_cached += run(core, seq_id, prompt, 100).num_cached
        for stranger in (1, 2):
            run(core, seq_id + stranger, random_tokens(rng, 3000), 100)
    assert num_cached >= 0.7 * 19 * 2200


def test_as_many_sequences_decode_as_their_blocks_allow() -> None:
    """Gemma 3 27B in 80 GiB: a sequence of 32,000 tokens holds 3.0 GiB, so 26 or 27 fit."""
    core = make_core(GEMMA_3, 16_384, num_slots=40)  # 5 MiB each
    for seq_id in range(40):
        prompt = array("i", random_tokens(random.Random(seq_id), 32_000))
        core.add(Request(seq_id, prompt, SamplingParams(max_tokens=600)))
    num_decodes = 0
    while core.has_unfinished:
        core.step()
        rows = core.scheduler.running.values()
        num_decodes = max(num_decodes, sum(seq.num_computed >= 32_000 for seq in rows))
    assert num_decodes in (26, 27)
    assert core.scheduler.num_preemptions < 10


def chat_hits(windows: Windows, num_blocks: int) -> float:
    """Return the fraction of prompt tokens that 24 chats of six turns hit."""
    core, rng = make_core(windows, num_blocks), random.Random(0)
    histories: list[list[int]] = [[] for _ in range(24)]
    for turn in range(6):
        for chat, history in enumerate(histories):
            prompt = history + random_tokens(rng, 400)
            histories[chat] = run(core, 24 * turn + chat, prompt, 300).token_ids.tolist()
    return core.scheduler.num_cache_hits / core.scheduler.num_cache_queries


def test_chats_hit_what_their_windows_have_left() -> None:
    """If windows kept all their blocks, as full attention does, hardly any chat would fit."""
    assert chat_hits(GEMMA_3, 4000) >= 0.75
    assert chat_hits((None,) * 7, 4000) < 0.3
