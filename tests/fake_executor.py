"""A device without arithmetic: it stores token ids as "KV" and predicts from what it reads back.

A wrong block, a stale token or a late finish therefore changes the output.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from nanovllm.engine.executor import ExecutorInfo, StateCounts, Windows
from nanovllm.engine.step import Bitmasks, StepPlan, StepResult
from nanovllm.worker.draft_rows import count_valid, host_drafts

VOCAB_SIZE = 23
EOS = 0


def predict(context: list[int], windows: Windows = (None,)) -> int:
    """Return the token after `context`, of which each group sees the last `window` tokens."""
    seen = [context[-window:] if window else context for window in windows]
    return zlib.crc32(bytes(token for part in seen for token in part)) % VOCAB_SIZE


def reference(prompt: list[int], max_tokens: int, windows: Windows = (None,)) -> list[int]:
    """Return the output computed without cache, batching or scheduling."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(predict(tokens, windows))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


@dataclass
class Done:
    value: StepResult
    needs_bitmasks: bool = False

    def result(self) -> StepResult:
        assert not self.needs_bitmasks
        return self.value


class FakeExecutor:
    """Runs plans in submission order, like one CUDA stream; a step writes before it reads."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        depth: int = 0,
        states: StateCounts | None = None,
        windows: Windows = (None,),
    ) -> None:
        self.windows = windows
        # A recurrent state is the list of tokens so far; None: the model has no such states.
        self.states: list[list[int]] | None = states and [[] for _ in range(states.total)]
        self.info = ExecutorInfo(num_blocks, depth, "fake", "none")
        self.block_size = block_size
        self.kv = np.full((num_blocks, block_size), -1)
        self.tokens: dict[int, dict[int, int]] = {}
        self.block_tables: dict[int, list[list[int]]] = {}  # keyed by slot; one table per group
        self.pooled: dict[int, list[int]] = {}  # keyed by slot: prompt length and sum of tokens
        self.plans: list[StepPlan] = []

    def start(self) -> ExecutorInfo:
        return self.info

    def close(self) -> None:
        pass

    def capture_one(self) -> bool:
        return False

    def mask_memory(self, num_rows: int, num_words: int) -> np.ndarray:
        return np.zeros((num_rows, num_words), np.int32)

    def sample(self, bitmasks: Bitmasks) -> None:
        """Complete the newest step; bitmasks change no token here."""
        assert self.newest.needs_bitmasks
        self.newest.needs_bitmasks = False
        num_logits = self.plans[-1].num_logits[np.isin(self.plans[-1].slots, bitmasks.slots)]
        assert len(bitmasks.words) == num_logits.sum()

    def submit(self, plan: StepPlan) -> Done:
        self.plans.append(plan)
        self._update_tables(plan)
        for state_copy in plan.state_copies:
            assert self.states is not None
            self.states[state_copy.target] = list(self.states[state_copy.source])
        columns = (plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist())
        rows = list(zip(*columns, strict=True))
        for slot, start, count in rows:
            for position in range(start, start + count):
                for group in range(len(self.windows)):
                    self.kv[self._address(slot, position, group)] = self.tokens[slot][position]
            if self.states is not None:
                seen = self.states[slot]
                assert seen == [self.tokens[slot][position] for position in range(start)]
                seen += [self.tokens[slot][p] for p in range(start, start + count)]
        sampled = []
        for (slot, start, count), num_logits in zip(rows, plan.num_logits.tolist(), strict=True):
            for end in range(start + count - num_logits + 1, start + count + 1):
                token = predict(self._seen(slot, end))
                self.tokens[slot][end] = token
                sampled.append(token)
        vectors, tokens = self._pool(rows), np.array(sampled, np.int32)
        columns = {"pooled": np.array(vectors, np.float32)} if vectors else {}
        num_valid = None
        if any(update.token_ids for update in plan.draft_updates):
            num_valid = count_valid(plan.num_logits, tokens, host_drafts(plan))
        self.newest = Done(StepResult(tokens, num_valid, columns), plan.needs_bitmasks)
        return self.newest

    def _seen(self, slot: int, end: int) -> list[int]:
        """Return what each group sees in the cache of the tokens before `end`."""
        return [
            int(self.kv[self._address(slot, position, group)])
            for group, window in enumerate(self.windows)
            for position in range(max(end - window, 0) if window else 0, end)
        ]

    def _pool(self, rows: list[tuple[int, int, int]]) -> list[list[int]]:
        """Return the token sums of the prompts that end here, accumulated over their chunks."""
        vectors = []
        for slot, start, count in rows:
            if slot in self.pooled:
                places = range(start, start + count)
                self.pooled[slot][1] += sum(int(self.kv[self._address(slot, p)]) for p in places)
                length, total = self.pooled[slot]
                if start + count == length:
                    vectors.append([total])
        return vectors

    def _update_tables(self, plan: StepPlan) -> None:
        for row in plan.new_rows:
            self.tokens[row.slot] = dict(enumerate(row.token_ids.tolist()))
            self.block_tables[row.slot] = [list(table) for table in row.tables]
            self.pooled.pop(row.slot, None)
            if row.pooling is not None:
                self.pooled[row.slot] = [row.num_prompt_tokens, 0]
        for draft in plan.draft_updates:
            self.tokens[draft.slot].update(enumerate(draft.token_ids, draft.num_tokens))
        for update in plan.block_updates:
            table = self.block_tables[update.slot][update.group]
            assert update.entry == len(table)
            table.append(update.block_id)

    def _address(self, slot: int, position: int, group: int = 0) -> tuple[int, int]:
        block_id = self.block_tables[slot][group][position // self.block_size]
        return block_id, position % self.block_size
