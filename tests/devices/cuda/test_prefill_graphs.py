"""Steps with prompts, padded to the bucket of a graph; here a function replaces the graph."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from benchmarks.models import model_path
from nanovllm import LLM
from nanovllm.attention.backend import AttentionSpec, DecodeRows
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cuda import prefill_graphs
from nanovllm.devices.cuda.prefill_graphs import (
    MANY_LEN,
    MANY_PROMPTS,
    MAX_ALONE_TOKENS,
    MAX_MANY_TOKENS,
    MAX_PROMPTS,
    MAX_TOKENS,
    MIN_MANY_TOKENS,
    Bucket,
    PrefillGraphs,
    bucket_sizes,
    count_many_tokens,
    max_chunks,
    needed_size,
    step_columns,
)
from nanovllm.engine.step import StepPlan
from nanovllm.models.config_json import read_model_config
from nanovllm.ops.interface import LayerCache
from nanovllm.ops.torch_delta_net import split_chunks
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.worker.forward import EagerForward, StepLogits, is_decode, look_up
from tests.devices import RunAgain
from tests.ops.reference_attention import reference_attention
from tests.test_equals_transformers import GREEDY, make_prompts
from tests.test_equals_transformers import MAX_TOKENS as NUM_NEW

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class ChunkRows:
    block_tables: Tensor
    decodes: Tensor
    prompts: Tensor
    max_query_len: int


class ReferenceChunks(SdpaAttention):
    """The reference of the attention kernels over the rows of a step, including padding."""

    def chunk_plan(
        self, block_tables: Tensor, decodes: Tensor, prompts: Tensor, max_query_len: int
    ) -> ChunkRows:
        return ChunkRows(block_tables, decodes, prompts, max_query_len)

    def decode_plan(self, rows: DecodeRows) -> ChunkRows:
        tokens = torch.arange(len(rows.slots), dtype=torch.int32)
        decodes = torch.stack((rows.slots, tokens, rows.context_lens))
        return ChunkRows(rows.block_tables, decodes, torch.zeros((4, 0), dtype=torch.int32), 1)

    def attend(self, q: Tensor, cache: LayerCache, plan: Any, spec: AttentionSpec) -> Tensor:
        if not isinstance(plan, ChunkRows):
            return super().attend(q, cache, plan, spec)
        slots, tokens, context_lens = plan.decodes
        columns = torch.stack((slots, tokens, context_lens, torch.ones_like(tokens)))
        out = torch.full_like(q, torch.nan)  # padding's output must have no effect
        block_table = plan.block_tables[:, cache.group]
        for rows in (columns, plan.prompts):
            by_row = rows[[0, 1, 3, 2]]  # the reference takes counts before context lengths
            part = reference_attention(q, cache.k, cache.v, block_table, *by_row, spec)
            for _, start, _, count in rows.T.tolist():  # padding also writes zeros
                assert count <= plan.max_query_len
                out[start : start + count] = part[start : start + count]
        return out


class GraphedDevice(RunAgain, CpuDevice):
    """A CPU device with graphs."""


def make_plan(rows: list[tuple[int, int, int, int]]) -> StepPlan:
    columns = np.array(rows, np.int32).reshape(-1, 4).T
    return StepPlan(*columns, [], [], [], 0)


def test_columns() -> None:
    """Slots 2, 7 and 4 run one, three and two tokens; slot 7 needs no logits."""
    plan = make_plan([(2, 40, 1, 1), (7, 10, 3, 0), (4, 0, 2, 1)])
    size = Bucket(num_tokens=8, num_decodes=5, num_prompts=4, num_rows=5, longest=8)
    tokens, decodes, prompts, sampled, chunks = np.split(
        step_columns(size, plan, padding=9), np.cumsum(size.lengths)[:-1]
    )
    assert chunks.size == 0
    assert tokens.reshape(2, 8).tolist() == [
        [2, 7, 7, 7, 4, 4, 9, 9],
        [40, 10, 11, 12, 0, 1, 0, 0],
    ]
    assert decodes.reshape(3, 5).tolist() == [[2, 9, 9, 9, 9], [0, 1, 1, 1, 1], [41, 0, 0, 0, 0]]
    rest = [0] * 2
    assert prompts.reshape(4, 4).tolist() == [
        [7, 4, *rest],
        [1, 4, *rest],
        [13, 2, *rest],
        [3, 2, *rest],
    ]
    assert sampled.reshape(3, 5).tolist() == [[2, 4, 9, 9, 9], [0, 5, 0, 0, 0], [41, 2, 0, 0, 0]]


def test_columns_of_prompts_alone() -> None:
    plan = make_plan([(7, 10, 3, 0), (4, 0, 2, 1)])
    size = Bucket(num_tokens=6, num_decodes=0, num_prompts=3, num_rows=2, longest=6)
    parts = np.split(step_columns(size, plan, padding=9), np.cumsum(size.lengths)[:-1])
    assert parts[0].reshape(2, 6).tolist() == [[7, 7, 7, 4, 4, 9], [10, 11, 12, 0, 1, 0]]
    assert parts[1].size == 0
    assert parts[3].reshape(3, 2).tolist() == [[4, 9], [4, 0], [2, 0]]


def test_columns_of_chunks() -> None:
    """Recurrent layers run 65 tokens in two chunks; a chunk of padding has no tokens."""
    plan = make_plan([(7, 10, 65, 1), (4, 8, 1, 1)])
    size = Bucket(num_tokens=80, num_decodes=3, num_prompts=3, num_rows=3, longest=80)
    size = size.with_chunks()
    chunks = step_columns(size, plan, padding=9)[-size.lengths[-1] :]
    assert chunks.reshape(-1, 4).tolist() == [
        [7, 0, 0, 65],
        [7, 64, 64, 1],
        [4, 65, 0, 1],
        [0, 0, 0, 0],
    ]


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_buckets_have_room_for_the_chunks_of_their_rows(num_rows: int) -> None:
    rng = np.random.default_rng(0)
    for size in bucket_sizes(4096, num_rows, max_many_tokens=0):
        shares = rng.dirichlet(np.full(size.num_rows, 0.5))
        counts = np.maximum((shares * (size.num_tokens - size.num_rows)).astype(np.int32), 1)
        num_chunks = len(split_chunks(np.arange(size.num_rows), counts))
        assert 0 < num_chunks <= size.with_chunks().num_chunks
        assert size.with_chunks().num_chunks <= max_chunks(4096, num_rows)


def test_columns_without_prompts() -> None:
    """Rows of one token that are not a decode step: slot 2's token is not its last one."""
    plan = make_plan([(2, 40, 1, 0), (4, 8, 1, 1)])
    size = Bucket(num_tokens=4, num_decodes=4, num_prompts=1, num_rows=4, longest=4)
    parts = np.split(step_columns(size, plan, padding=9), np.cumsum(size.lengths)[:-1])
    assert parts[1].reshape(3, 4).tolist() == [[2, 4, 9, 9], [0, 1, 3, 3], [41, 9, 0, 0]]


@pytest.mark.parametrize("max_tokens", [1, 15, 16, 17, 100, 1024, 1025, 4096, 16384])
@pytest.mark.parametrize("max_rows", [1, 16, 512])
def test_sizes(max_tokens: int, max_rows: int) -> None:
    sizes = bucket_sizes(max_tokens, max_rows, max_many_tokens=0)
    assert sizes == sorted(sizes, key=lambda size: size.num_tokens)
    assert sizes[-1].num_tokens <= MAX_TOKENS
    largest = needed_size(make_plan([(0, 0, min(max_tokens, MAX_TOKENS), 1)]))
    fitting = [size for size in sizes if size.fits(largest)]
    assert {size.num_tokens for size in fitting} == {sizes[-1].num_tokens}
    is_alone = largest.num_tokens > 1 and sizes[-1].num_tokens <= MAX_ALONE_TOKENS
    assert [size.num_decodes > 0 for size in fitting] == [False, True][not is_alone :]
    assert all(size.num_rows <= max_rows for size in sizes)


@pytest.mark.parametrize("max_tokens", [1000, 3000, 5000, 16384])
@pytest.mark.parametrize("most", [1023, 1024, 2500, 8192])
def test_sizes_of_many_prompts(max_tokens: int, most: int) -> None:
    """The largest bucket, which is captured first, has memory for all others."""
    sizes = bucket_sizes(max_tokens, 256, most)
    assert sizes == sorted(sizes, key=lambda size: size.num_tokens)
    assert sizes[-1].num_rows == max(size.num_rows for size in sizes)
    many = [size for size in sizes if size.num_prompts == MANY_PROMPTS]
    assert all(MIN_MANY_TOKENS <= size.num_tokens <= most for size in many)
    assert bool(many) == (most >= 1024)
    few = [size for size in sizes if size.num_prompts < MANY_PROMPTS]
    assert few == bucket_sizes(max_tokens, 256, max_many_tokens=0)


@pytest.mark.parametrize("max_rows", [1, 8, 16, 17, 63])
def test_few_sequences_are_never_many_prompts(max_rows: int) -> None:
    sizes, few = (bucket_sizes(16384, max_rows, most) for most in (MAX_MANY_TOKENS, 0))
    assert (sizes == few) == (max_rows <= MAX_PROMPTS)
    assert all(size.num_prompts <= max(max_rows, MAX_PROMPTS) for size in sizes)


def test_many_prompts_of_a_small_model() -> None:
    small, large = (
        read_model_config(json.loads(Path(model_path(name)).read_text()))
        for name in ("qwen3-0.6b", "qwen3-8b")
    )
    assert count_many_tokens(small) == MAX_MANY_TOKENS
    assert count_many_tokens(large) < MIN_MANY_TOKENS


def plain_write_words(words: Tensor, pairs: Tensor, count: Tensor) -> None:
    offsets, values = pairs[: int(count)].T
    words[offsets.long()] = values


def plain_gather_tokens(
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    rope_offsets: Tensor,
    block_size: int,
    columns: tuple[Tensor, Tensor, Tensor],
) -> None:
    tables: Any = SimpleNamespace(tokens=tokens, block_tables=block_tables, block_size=block_size)
    input_ids, slot_mapping = look_up(tables, slots.long(), positions.long())
    slot_mapping[:, slots == len(tokens) - 1] = -1
    positions = positions + rope_offsets[slots.long()]
    for column, found in zip(columns, (input_ids, positions, slot_mapping), strict=True):
        column.copy_(found)


@pytest.mark.parametrize(
    ("max_tokens", "max_changes", "max_prompts"),
    [
        (9, 8192, 16),
        (40, 30, 16),
        (64, 8192, 1),
        pytest.param(4096, 8192, 16, marks=pytest.mark.slow),
    ],
)
def test_padded_steps_equal_transformers(
    tiny: Any,
    monkeypatch: pytest.MonkeyPatch,
    max_tokens: int,
    max_changes: int,
    max_prompts: int,
) -> None:
    """Tokens are the same even if a step changes more of the tables than its graph can write.

    Steps of more than max_prompts prompts use the graphs for many prompts.
    """
    monkeypatch.setattr(prefill_graphs, "MAX_CHANGES", max_changes)
    monkeypatch.setattr(prefill_graphs, "MAX_PROMPTS", max_prompts)
    monkeypatch.setattr(prefill_graphs, "MIN_MANY_TOKENS", 16)
    monkeypatch.setattr(prefill_graphs, "write_words", plain_write_words)
    monkeypatch.setattr(prefill_graphs, "gather_tokens", plain_gather_tokens)
    monkeypatch.setattr(CpuDevice, "ops", lambda *_: TorchOps())
    monkeypatch.setattr(CpuDevice, "attention", lambda *_: ReferenceChunks(16))
    checkpoint, prompts = tiny("qwen3"), make_prompts()
    options = {"kvcache_block_size": 16, "max_num_seqs": 8, "max_model_len": 128}
    with LLM(
        checkpoint.path, skip_tokenizer_init=True, max_num_batched_tokens=max_tokens, **options
    ) as llm:
        executor: Any = llm.engine.core.executor
        runner = executor.runner
        eager: EagerForward = runner.forward
        device: Any = GraphedDevice(EngineConfig("none"))
        attention: Any = eager.attention
        with torch.inference_mode():
            sizes = bucket_sizes(
                max_tokens, eager.input_batch.num_slots, max_many_tokens=max_tokens
            )
            chunks = PrefillGraphs(eager, attention, device, sizes)
            for size in chunks.sizes[::-1]:
                chunks.graph(size)
        num_chunks = num_many = 0

        def forward(plan: StepPlan) -> StepLogits:
            nonlocal num_chunks, num_many
            step = None if is_decode(plan) else chunks(plan)
            num_chunks += step is not None
            num_many += step is not None and needed_size(plan).num_prompts > max_prompts
            return eager(plan) if step is None else step

        runner.forward = forward
        want = checkpoint.answers(prompts, NUM_NEW)
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.token_ids for output in outputs] == want
    assert num_chunks > 5
    assert (num_many > 0) == (max_prompts == 1)


@pytest.mark.parametrize(
    ("num_rows", "count", "most", "is_run"),
    [
        (2, 100, 0, True),
        (1, MAX_TOKENS, 0, True),
        (1, MAX_TOKENS + 1, 0, False),
        (MAX_PROMPTS, 2, 0, True),
        (MAX_PROMPTS + 1, 2, 0, False),
        (MAX_PROMPTS + 1, 2, 1024, True),
        (MANY_PROMPTS, 128, 8192, True),
        (MANY_PROMPTS + 1, 2, 8192, False),
        (MAX_PROMPTS + 1, MANY_LEN + 1, 8192, False),
        (17, 1, 0, True),  # fits the next bucket, which has enough rows
        (300, 1, 0, False),
    ],
)
def test_what_does_not_fit_is_left_to_others(
    num_rows: int, count: int, most: int, is_run: bool
) -> None:
    plan = make_plan([(i, 0, count, 0) for i in range(num_rows)])
    sizes = [size for size in bucket_sizes(16384, 512, most) if size.fits(needed_size(plan))]
    assert bool(sizes) == is_run
