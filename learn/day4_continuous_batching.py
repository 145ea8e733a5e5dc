"""Day 4: continuous batching, with a scheduler that counts.

A decode step reads all weights for one token (day 2). If several sequences run in the same step,
they share that read. Before every step, the scheduler decides which tokens run: a sequence joins as
soon as there is room, and leaves as soon as it is done. There are no separate phases. Each sequence
has `num_computed` tokens that have run and `len(token_ids)` tokens that exist. The first number
catches up with the second: by many tokens (prefill), some (chunked prefill) or one (decode).

From day 1: the model. From day 3: sequences, blocks and paged attention, unchanged.

    python learn/day4_continuous_batching.py
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common import Model, Table, best_time, load_from_command_line, print_table, show, timed
from day1_forward import Attend, compute_logits, forward
from day3_paged_cache import BlockManager, PagedCache, Sequence, paged_attend

NUM_BLOCKS = 32
BLOCK_SIZE = 4
MAX_NUM_SEQS = 4  # sequences that may run at the same time
MAX_NUM_BATCHED_TOKENS = 12  # tokens that may run in one step
BATCH_SIZES = (1, 2, 4, 8)  # to measure
REQUESTS = {  # name: (prompt, how many tokens to generate)
    "A": ("The first man on the moon was", 3),
    "B": ("The sky is blue because", 12),
    "C": ("List of planets: Mercury, Venus,", 4),
    "D": ("One, two, three,", 3),
    "E": ("Once upon a time, there was", 10),
    "F": ("Q: Why is the sky blue?\nA:", 4),
    "G": ("The three primary colors are", 3),
    "H": ("Dogs and cats are", 5),
}


@dataclass(frozen=True)
class Row:
    """One sequence in one step: its tokens [start, end) run."""

    seq: Sequence
    start: int
    end: int
    is_sampled: bool  # whether it reaches the end of the known tokens, so that a new one follows

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Scheduler:
    """Decides which tokens run in each step. It moves counts and never touches a tensor."""

    def __init__(
        self,
        blocks: BlockManager,
        eos_ids: frozenset[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.blocks, self.eos_ids = blocks, eos_ids
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def schedule(self) -> list[Row]:
        """Plan one step: first the running sequences, then as many waiting ones as fit."""
        budget, rows = self.max_num_batched_tokens, []
        for seq in self.running:
            budget -= self._add_row(rows, seq, budget)
        self._admit(rows, budget)
        return rows

    def _admit(self, rows: list[Row], budget: int) -> None:
        """Move waiting sequences to `running`, in order, while there is room."""
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            # Take all blocks that it may ever need, so that it cannot get stuck. Day 5 takes less.
            if not self.blocks.allocate(seq, seq.num_prompt_tokens + seq.max_tokens):
                break
            self.running.append(self.waiting.popleft())
            budget -= self._add_row(rows, seq, budget)

    def _add_row(self, rows: list[Row], seq: Sequence, budget: int) -> int:
        """Plan as many tokens of `seq` as the budget allows; return their number."""
        start, end = seq.num_computed, min(len(seq.token_ids), seq.num_computed + budget)
        if end > start:
            rows.append(Row(seq, start, end, is_sampled=end == len(seq.token_ids)))
            seq.num_computed = end
        return end - start

    def commit(self, rows: list[Row], next_ids: list[int]) -> None:
        """Append the tokens that a step chose, and end the sequences that are done."""
        sampled = [row.seq for row in rows if row.is_sampled]
        for seq, token_id in zip(sampled, next_ids, strict=True):
            seq.token_ids.append(token_id)
            if seq.is_finished(self.eos_ids):
                self.running.remove(seq)
                self.blocks.release(seq)


def batched_attend(cache: PagedCache, rows: list[Row]) -> Attend:
    """Return the attention function of a step: each row sees only its own sequence."""
    attends = [paged_attend(cache, row.seq.block_table, row.start, row.end) for row in rows]
    counts = [row.num_tokens for row in rows]

    def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(attends, q.split(counts), k.split(counts), v.split(counts), strict=True)
        return torch.cat([attend_row(layer_index, *qkv) for attend_row, *qkv in parts])

    return attend


@torch.inference_mode()
def run_rows(model: Model, cache: PagedCache, rows: list[Row]) -> Tensor:
    """Run the tokens of all rows as one flat batch; return the scores of each sampled row."""
    token_ids = [token_id for row in rows for token_id in row.seq.token_ids[row.start : row.end]]
    positions = torch.cat([torch.arange(row.start, row.end) for row in rows])
    hidden = forward(model, torch.tensor(token_ids), positions, batched_attend(cache, rows))
    ends = torch.tensor([row.num_tokens for row in rows]).cumsum(0)  # where each row ends
    is_sampled = torch.tensor([row.is_sampled for row in rows])
    last = ends[is_sampled] - 1  # the index of the last token of each sampled row
    return compute_logits(model, hidden[last])  # [sampled rows, vocab_size]


class Engine:
    """The loop: schedule, run, commit."""

    def __init__(self, model: Model, cache: PagedCache, scheduler: Scheduler) -> None:
        self.model, self.cache, self.scheduler = model, cache, scheduler

    def step(self) -> list[Row]:
        """Run one step; return its rows."""
        rows = self.scheduler.schedule()
        assert rows, "a sequence needs more blocks than the pool has"
        logits = run_rows(self.model, self.cache, rows)
        self.scheduler.commit(rows, logits.argmax(dim=-1).tolist())
        return rows

    def run(self, sequences: list[Sequence]) -> list[list[Row]]:
        """Run all sequences to their end; return the rows of every step."""
        self.scheduler.waiting.extend(sequences)
        steps = []
        while self.scheduler.waiting or self.scheduler.running:
            steps.append(self.step())
        return steps


def timeline(sequences: list[Sequence], steps: list[list[Row]]) -> list[str]:
    """Draw a line per sequence: the number of its tokens in each step, or '.' while it waits."""
    numbers = "".join(str(number).rjust(3) for number in range(1, len(steps) + 1))
    lines = [f"  step    {numbers}"]
    for seq in sequences:
        counts = [sum(row.num_tokens for row in rows if row.seq is seq) for rows in steps]
        last = max(i for i, count in enumerate(counts) if count)
        cells = [str(count or ".") for count in counts[: last + 1]]
        lines.append(f"  {seq.name}       " + "".join(cell.rjust(3) for cell in cells))
    totals = [sum(row.num_tokens for row in rows) for rows in steps]
    return [*lines, "  tokens  " + "".join(str(total).rjust(3) for total in totals)]


def measure(model: Model) -> None:
    """Print the time of a decode step with more and more sequences."""
    cache = PagedCache(model.config, max(BATCH_SIZES), BLOCK_SIZE)
    sequences = [Sequence(str(i), [i], 1, block_table=[i]) for i in range(max(BATCH_SIZES))]
    rows = [Row(seq, 0, 1, is_sampled=True) for seq in sequences]
    run_rows(model, cache, rows)  # the first call is slower
    table = Table(["sequences in a decode step", "ms", "tokens/s"], [0, 4, 0])
    for size in BATCH_SIZES:
        milliseconds = best_time(run_rows, model, cache, rows[:size])
        table.add(size, milliseconds, round(1000 * size / milliseconds, 1))


def run_policy(
    model: Model, sequences: list[Sequence], batch_size: int, max_num_seqs: int
) -> list[list[Row]]:
    """Run batches of `batch_size` sequences, each to its end before the next one may join."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(blocks, model.config.eos_ids, max_num_seqs, MAX_NUM_BATCHED_TOKENS)
    engine = Engine(model, PagedCache(model.config, NUM_BLOCKS, BLOCK_SIZE), scheduler)
    steps = []
    for first in range(0, len(sequences), batch_size):
        steps += engine.run(sequences[first : first + batch_size])
    return steps


def main(model: Model, tokenizer: Any) -> None:
    print("Why batch? All sequences in a step share one read of the weights:")
    measure(model)
    print()

    prompts = {name: tokenizer.encode(prompt) for name, (prompt, _) in REQUESTS.items()}
    policies = {  # name: (batch_size, max_num_seqs)
        "one at a time": (1, 1),
        "static batching": (MAX_NUM_SEQS, MAX_NUM_SEQS),
        "continuous batching": (len(REQUESTS), MAX_NUM_SEQS),
    }
    megabytes = 4 * model.num_parameters / 1e6
    table, outputs = [], []
    for policy, sizes in policies.items():
        sequences = [Sequence(name, list(prompts[name]), REQUESTS[name][1]) for name in REQUESTS]
        steps, milliseconds = timed(run_policy, model, sequences, *sizes)
        if policy != "one at a time":
            print(f"{policy}: how many tokens of each sequence run in each step ('.': it waits)")
            print("\n".join(timeline(sequences, steps)) + "\n")
        outputs.append([seq.output_ids for seq in sequences])
        num_run = sum(row.num_tokens for rows in steps for row in rows)
        num_new = sum(map(len, outputs[-1]))
        weights_read = f"{len(steps)} x {megabytes:.0f} MB"
        per_token = round(len(steps) * megabytes / num_new)
        rate = round(1000 * num_new / milliseconds, 1)
        table.append((policy, num_run, len(steps), weights_read, per_token, rate))
    print(
        "Every step reads all weights once. Fewer steps read less memory per new token: the gain\n"
        "on a GPU. One core of a CPU is soon busy computing, so its rate grows less."
    )
    header = ["policy", "tokens run", "steps", "weights read", "MB/new token", "new tokens/s"]
    print_table(header, table)
    assert outputs[0] == outputs[1] == outputs[2], "the policy changed the output"
    print("\nAll three generated the same texts:")
    for seq in sequences:
        print(f"  {seq.name}: {show(tokenizer, seq.token_ids)}")


# Exercises (solutions: learn/solutions/day4.py)
#
# 1. A step with a long prefill takes longer than a decode step, and every decoding sequence waits
#    for it: its text stutters. Write `LatencyScheduler`, which runs at most `max_prefill_tokens=4`
#    of prompts in a step that has decode rows too. What is the price, and who pays it?
# 2. Give sequences a `priority` (`PrioritySequence`, `PriorityScheduler`), and admit the waiting
#    sequence with the lowest number first, as vLLM does; equal ones keep their order. Can a
#    sequence starve? What would you do about it?

if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
