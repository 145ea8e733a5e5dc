"""Put drafts into the InputBatch and run them as decode rows, which verifies them in one step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nanovllm.engine.step import DraftUpdate, StepPlan
from nanovllm.sampling_params import NO_TOKEN


def drafts_as_rows(plan: StepPlan) -> StepPlan:
    """Split each row with drafts into decode rows, one for each position, that share its slot.

    Keys and values are written before attention reads them, so each row sees those of earlier rows.
    """
    rows: list[tuple[int, int, int, int]] = []  # plain lists: drafts are for small batches
    firsts = []  # index of each old row's first new row, and the end
    columns = plan.slots, plan.starts, plan.counts, plan.num_logits
    for slot, start, count, num_logits in zip(*(c.tolist() for c in columns), strict=True):
        firsts.append(len(rows))
        if num_logits > 1:
            rows += [(slot, start + offset, 1, 1) for offset in range(num_logits)]
        else:
            rows.append((slot, start, count, num_logits))
    firsts.append(len(rows))
    masked = [
        new for row in plan.masked_rows.tolist() for new in range(firsts[row], firsts[row + 1])
    ]
    slots, starts, counts, num_logits = np.array(rows, np.int32).T
    return replace(
        plan,
        slots=slots,
        starts=starts,
        counts=counts,
        num_logits=num_logits,
        masked_rows=np.array(masked, np.int32),
    )


def draft_changes(
    update: DraftUpdate, first_token: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes of an InputBatch, as offsets of words and their new values.

    `first_token` and `length` are the offsets of the slot's first token and of its length.
    """
    num_tokens, drafts = update.num_tokens, update.token_ids
    offsets, values = [length], [num_tokens + len(drafts)]
    if NO_TOKEN not in drafts:
        begin = first_token + num_tokens
        offsets += range(begin, begin + len(drafts))
        values += drafts
    return np.array(offsets), np.array(values, np.int32)
