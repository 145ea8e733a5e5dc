"""Day 7: a step ahead changes the order of the work, not the output."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import day7 as solutions
import pytest

import day7_step_ahead as day7
from common import Model, load_model
from day3_paged_cache import BlockManager, PagedCache
from day4_continuous_batching import Row
from tests.checkpoints import TinyCheckpoint
from tests.learn.test_day4 import PROMPTS

NUM_BLOCKS, BLOCK_SIZE, MAX_TOKENS = 24, 4, 8


def make_engine(
    model: Model,
    depth: int,
    num_seqs: int = 4,
    num_tokens: int = 40,
    num_blocks: int = NUM_BLOCKS,
    device_class: type[day7.Device] = day7.Device,
) -> day7.Engine:
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    device = device_class(model, PagedCache(model.config, num_blocks, BLOCK_SIZE))
    scheduler = day7.Scheduler(blocks, model.config.eos_ids, num_seqs, num_tokens)
    return day7.Engine(device, scheduler, depth)


def new_sequences(prompts: list[list[int]] = PROMPTS) -> list[day7.Sequence]:
    return [day7.Sequence(str(i), list(ids), MAX_TOKENS) for i, ids in enumerate(prompts)]


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(1, 64), (3, 7), (6, 40)])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_equals_transformers(
    depth: int,
    num_seqs: int,
    num_tokens: int,
    tiny: Callable[[str], TinyCheckpoint],
    tiny_llama: Model,
) -> None:
    engine = make_engine(tiny_llama, depth, num_seqs, num_tokens)
    sequences = new_sequences()
    engine.run(sequences)
    assert [seq.output_ids for seq in sequences] == tiny("llama").answers(PROMPTS, MAX_TOKENS)
    assert engine.scheduler.num_late == 0  # the number of tokens is known by count
    assert len(engine.scheduler.blocks.free_ids) == NUM_BLOCKS
    assert [span.step for span in engine.device.spans] == [span.step for span in engine.spans]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_end_of_a_text_is_seen_late(
    depth: int, tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    right = tiny("llama").answers(PROMPTS, MAX_TOKENS)
    eos = right[0][2]
    model = replace(tiny_llama, config=replace(tiny_llama.config, eos_ids=frozenset({eos})))
    engine, sequences = make_engine(model, depth), new_sequences()
    engine.run(sequences)
    ends = [ids.index(eos) + 1 if eos in ids else MAX_TOKENS for ids in right]
    assert [seq.output_ids for seq in sequences] == [
        ids[:end] for ids, end in zip(right, ends, strict=True)
    ]
    num_late = [min(depth, MAX_TOKENS - end) for end in ends]
    assert (engine.scheduler.num_late > 0) == (depth > 0)
    assert engine.scheduler.num_late <= sum(num_late)


class HeldDevice(day7.Device):
    """Runs no step before the test says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may_run = threading.Event()
        self.submitted: list[list[Row]] = []

    def submit(self, rows: list[Row]) -> Future[list[int]]:
        self.submitted.append(rows)
        return super().submit(rows)

    def _run(self, rows: list[Row]) -> list[int]:
        assert self.may_run.wait(timeout=60)
        return super()._run(rows)


def test_the_next_step_is_planned_before_the_tokens_are_known(
    tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    engine = make_engine(tiny_llama, depth=1, device_class=HeldDevice)
    device = engine.device
    assert isinstance(device, HeldDevice)
    [seq] = new_sequences(PROMPTS[:1])
    engine.scheduler.waiting.append(seq)
    engine.step()
    assert (seq.token_ids, seq.num_pending) == (PROMPTS[0], 1)
    stepping = threading.Thread(target=engine.step)
    stepping.start()
    while len(device.submitted) < 2:  # the second plan arrives while the first step waits
        stepping.join(timeout=0.001)
    second = device.submitted[1][0]
    assert (second.start, second.end) == (len(PROMPTS[0]), len(PROMPTS[0]) + 1)
    assert (seq.token_ids, seq.num_pending) == (PROMPTS[0], 2)
    device.may_run.set()
    stepping.join()
    engine.run([])
    assert seq.output_ids == tiny("llama").generate(PROMPTS[0], MAX_TOKENS)


def test_the_program(
    smollm2: tuple[Model, Any], assert_greedy: Callable[..., None], run_program: Callable[..., str]
) -> None:
    _, tokenizer = smollm2
    prompts = {name: day7.REQUESTS[name][0] for name in "AB"}
    printed = run_program(
        day7, REQUESTS={"A": (prompts["A"], 10), "B": (prompts["B"], 12)}, HOST_SHARE=0.1
    )
    rows = [line.split() for line in printed.splitlines() if line.startswith("      ")]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("0", "10", "0"), ("1", "10", "1")]
    output = "The capital of Italy is Rome.<|im_end|>"
    assert f"\n  B: {output!r}\n" in printed
    assert_greedy(tokenizer.encode(prompts["B"]), tokenizer.encode(output))


def test_draw() -> None:
    spans = [day7.Span(1, 10.0, 10.4), day7.Span(2, 10.6, 11.0), day7.Span(12, 11.0, 11.2)]
    assert day7.draw(spans, 10.0, 0.1) == "1111  222222"


def test_exercise_1_tensor_parallelism(
    tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    output_ids = solutions.generate_on_ranks(tiny_llama, PROMPTS[1], MAX_TOKENS)
    assert output_ids == tiny("llama").generate(PROMPTS[1], MAX_TOKENS)


def test_shards_of_three_heads_on_two_ranks(smollm2: tuple[Model, Any]) -> None:
    model, _ = smollm2
    shards = [solutions.shard_model(model, rank, 2) for rank in range(2)]
    assert [shard.config.num_kv_heads for shard in shards] == [2, 1]
    for name, dim in (("q_proj", 0), ("v_proj", 0), ("o_proj", 1), ("down_proj", 1)):
        widths = [shard.layers[0][name].shape[dim] for shard in shards]
        assert sum(widths) == model.layers[0][name].shape[dim]
        assert (widths[0] == 2 * widths[1]) == (name != "down_proj")


def test_the_solution_shows_an_abort(
    tiny_folder: Path, smollm2: tuple[Model, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    solutions.show_abort(load_model(str(tiny_folder)), smollm2[1])
    assert "A aborted: 15 blocks free, steps in flight: 1" in capsys.readouterr().out


@pytest.mark.parametrize("depth", [0, 1])
def test_exercise_2_abort(
    depth: int, tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    engine = make_engine(tiny_llama, depth, num_seqs=2, num_blocks=17)
    aborted, other, never, last = sequences = new_sequences(PROMPTS[:4])
    engine.scheduler.waiting.extend(sequences)
    for _ in range(3):
        engine.step()
    freed = set(aborted.block_table)
    num_known = len(aborted.token_ids)
    for seq in (aborted, never):
        solutions.abort(engine, seq)
    engine.step()
    assert freed < set(last.block_table)  # at once, though with depth 1 a step is in flight
    engine.run([])
    solutions.abort(engine, last)  # does nothing: it has ended
    assert len(aborted.token_ids) == num_known
    assert never.output_ids == []
    right = tiny("llama").answers(PROMPTS[:4], MAX_TOKENS)
    assert [other.output_ids, last.output_ids] == [right[1], right[3]]
    assert engine.scheduler.num_late == depth
    assert len(engine.scheduler.blocks.free_ids) == 17
