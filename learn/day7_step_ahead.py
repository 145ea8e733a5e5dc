"""Day 7: the step ahead (asynchronous scheduling), or how host and device overlap.

Since day 4 the loop is: plan a step, run it, handle its tokens. While the host plans and handles,
the device is idle, and while the device runs, the host waits. Today the host plans step n + 1 while
step n still runs, although nobody knows yet which tokens step n will choose.

This works because planning is counting: the scheduler has to know how many tokens there are, not
which. The device does have to know which, but it is the device that chooses them.

Our device is a thread, which works because torch releases Python's lock while it computes.

From day 4: the scheduler and the batch. From day 3: sequences and blocks.

    python learn/day7_step_ahead.py
"""

from __future__ import annotations

import copy
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import day3_paged_cache as day3
import day4_continuous_batching as day4
from common import Model, load_from_command_line, print_table, show
from day3_paged_cache import BlockManager, PagedCache
from day4_continuous_batching import Row, run_rows

BLOCK_SIZE = 16
NUM_BLOCKS = 16
MAX_NUM_SEQS = 4
MAX_NUM_BATCHED_TOKENS = 64
HOST_SHARE = 0.5  # what the host does for each step takes this share of the device's time
NUM_DRAWN, WIDTH = 7, 80  # steps in the timeline, and its characters
QUESTION = "What is the capital of Italy?"
REQUESTS = {  # name: (prompt, how many tokens to generate)
    "A": ("The first man on the moon was", 12),
    "B": (f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n", 12),
    "C": ("One, two, three,", 12),
}


@dataclass(eq=False)
class Sequence(day3.Sequence):
    """Day 3's sequence, with a count that runs ahead of the tokens."""

    num_pending: int = 0  # tokens that are planned, but whose values the host does not know yet

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending


@dataclass(frozen=True)
class Span:
    """The time in which the host or the device worked on a step, for the timeline."""

    step: int
    begin: float  # seconds
    end: float


class Scheduler(day4.Scheduler):
    """Day 4's, but counts change when a step is planned, and token ids follow at its commit."""

    num_late = 0  # rows that ran for a sequence that had already ended

    def _add_row(self, rows: list[Row], seq: Sequence, budget: int) -> int:
        """As on day 4, but count the tokens that are still on the device, too."""
        if seq.num_tokens == seq.num_prompt_tokens + seq.max_tokens:
            return 0  # its last token is pending
        start, end = seq.num_computed, min(seq.num_tokens, seq.num_computed + budget)
        if end > start:
            is_sampled = end == seq.num_tokens
            rows.append(Row(seq, start, end, is_sampled))
            seq.num_computed = end
            seq.num_pending += is_sampled  # the next plan counts on this token
        return end - start

    def commit(self, rows: list[Row], next_ids: list[int]) -> None:
        """Append the tokens of a step, except those of sequences that have already ended."""
        sampled = zip([row for row in rows if row.is_sampled], next_ids, strict=True)
        kept_rows, kept_ids = [], []
        for row, token_id in sampled:
            row.seq.num_pending -= 1
            if row.seq in self.running:
                kept_rows.append(row)
                kept_ids.append(token_id)
            else:
                self.num_late += 1
        super().commit(kept_rows, kept_ids)


class Device:
    """Runs steps one after the other in a thread of its own, as a GPU does in a stream.

    It has its own copy of every sequence. The host sends one when the sequence enters; from then on
    the device appends the tokens that it chooses, so it always has the ones that it needs.
    """

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self.model, self.cache = model, cache
        # A copy disappears together with the host's sequence, its key.
        self.copies: WeakKeyDictionary[Sequence, Sequence] = WeakKeyDictionary()
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.spans: list[Span] = []

    def submit(self, rows: list[Row]) -> Future[list[int]]:
        """Queue a step, and return at once, with a future for the tokens that it chooses."""
        for row in rows:
            if row.seq not in self.copies:
                self.copies[row.seq] = copy.deepcopy(row.seq)
        own_rows = [replace(row, seq=self.copies[row.seq]) for row in rows]
        return self.thread.submit(self._run, own_rows)

    def _run(self, rows: list[Row]) -> list[int]:
        begin = time.perf_counter()
        next_ids = run_rows(self.model, self.cache, rows).argmax(dim=-1).tolist()
        sampled = [row.seq for row in rows if row.is_sampled]
        for seq, token_id in zip(sampled, next_ids, strict=True):
            seq.token_ids.append(token_id)  # the next step reads it here
        self.spans.append(Span(len(self.spans), begin, time.perf_counter()))
        return next_ids


class Engine:
    """The loop. With depth 0, each step waits for the previous one; depth 1 plans one ahead."""

    def __init__(
        self, device: Device, scheduler: Scheduler, depth: int, host_seconds: float = 0.0
    ) -> None:
        self.device, self.scheduler, self.depth = device, scheduler, depth
        self.host_seconds = host_seconds  # how long the host takes to handle the tokens of a step
        self.in_flight: deque[tuple[list[Row], Future[list[int]]]] = deque()
        self.spans: list[Span] = []

    def step(self) -> None:
        """Launch the next step, if there is one; collect the oldest if too many are in flight."""
        rows = self.scheduler.schedule()
        if rows:
            self.in_flight.append((rows, self.device.submit(rows)))
        assert self.in_flight, "a sequence needs more blocks than the pool has"
        if not rows or len(self.in_flight) > self.depth:
            rows, future = self.in_flight.popleft()
            next_ids = future.result()  # the only line that waits for the device
            begin = time.perf_counter()
            self.scheduler.commit(rows, next_ids)
            time.sleep(self.host_seconds)  # detokenize, find stop strings, answer clients ...
            self.spans.append(Span(len(self.spans), begin, time.perf_counter()))

    def run(self, sequences: list[Sequence]) -> None:
        self.scheduler.waiting.extend(sequences)
        while self.scheduler.waiting or self.scheduler.running or self.in_flight:
            self.step()


def run_requests(
    model: Model, tokenizer: Any, depth: int, host_seconds: float
) -> tuple[Engine, list[Sequence]]:
    """Run all requests with a new engine; return it and the finished sequences."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(blocks, model.config.eos_ids, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    device = Device(model, PagedCache(model.config, NUM_BLOCKS, BLOCK_SIZE))
    engine = Engine(device, scheduler, depth, host_seconds)
    sequences = [
        Sequence(name, tokenizer.encode(prompt), max_tokens)
        for name, (prompt, max_tokens) in REQUESTS.items()
    ]
    engine.run(sequences)
    return engine, sequences


def draw(spans: list[Span], begin: float, seconds_per_cell: float) -> str:
    """Draw time from left to right; a digit is the step that was worked on."""
    line = ""
    for span in spans:
        first, last = ((each - begin) / seconds_per_cell for each in (span.begin, span.end))
        line = line.ljust(round(first)).ljust(round(last), str(span.step % 10))
    return line


def main(model: Model, tokenizer: Any) -> None:
    engine, sequences = run_requests(model, tokenizer, depth=0, host_seconds=0.0)
    durations = sorted(span.end - span.begin for span in engine.device.spans)
    host_seconds = HOST_SHARE * durations[len(durations) // 2]  # of a median step
    outputs, table, scale = [[seq.output_ids for seq in sequences]], [], 0.0
    for depth in (0, 1):
        engine, sequences = run_requests(model, tokenizer, depth, host_seconds)
        outputs.append([seq.output_ids for seq in sequences])
        device, host = engine.device.spans, engine.spans
        drawn = slice(1, NUM_DRAWN + 1)  # step 0 runs the prompts and takes longer
        begin = device[drawn][0].begin
        scale = scale or (host[drawn][-1].end - begin) / WIDTH  # the same for both pictures
        print(f"depth {depth}: the step that the device runs, and the one that the host handles")
        print("  device  " + draw(device[drawn], begin, scale))
        print("  host    " + draw(host[drawn], begin, scale) + "\n")

        seconds = host[-1].end - device[0].begin
        busy = sum(span.end - span.begin for span in device) / seconds
        ms_per_step = round(1000 * seconds / len(host))
        table.append((depth, len(host), ms_per_step, f"{busy:.0%}", engine.scheduler.num_late))
    print_table(["depth", "steps", "ms per step", "device busy", "late rows"], table)
    assert outputs[0] == outputs[1] == outputs[2], "the depth changed the output"
    print("\nThe texts are the same:")
    for seq in sequences:
        print(f"  {seq.name}: {show(tokenizer, seq.output_ids)}")


# Exercises (solutions: learn/solutions/day7.py)
#
# 1. (Long: a day by itself.) Tensor parallelism: write `generate_on_ranks(model, prompt_ids,
#    max_tokens)`, which splits a model over two processes that run the same steps. Each holds some
#    of the heads and some of the MLP's inner units, hence rows of q_proj, k_proj, v_proj, gate_proj
#    and up_proj, and columns of o_proj and down_proj. Where must the processes add up their
#    results (`torch.distributed.all_reduce`, with the backend "gloo"), and how often per token?
#    SmolLM2 has three kv heads. Does that matter?
# 2. A client can go away while steps with its sequence are in flight. Write `abort(engine, seq)`,
#    which ends a sequence and frees its blocks at once. The next plan may give these blocks to
#    another sequence, although a step in flight will still write to them. Why does this do no
#    harm?

if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
