"""Write draft tokens to the InputBatch, and verify them in one step by running decode rows.

Verification compares the sampled tokens with the draft tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nanovllm.engine.step import DraftUpdate, IntColumn, StepPlan
from nanovllm.sampling_params import NO_TOKEN


def drafts_as_rows(plan: StepPlan) -> StepPlan:
    """Split each row with draft tokens into decode rows, one per position, which share its slot.

    Keys and values are written before attention reads them, so each row sees those of earlier rows.
    """
    rows: list[tuple[int, int, int, int]] = []  # lists suffice: drafts are for small batches
    columns = plan.slots, plan.starts, plan.counts, plan.num_logits
    for slot, start, count, num_logits in zip(*(c.tolist() for c in columns), strict=True):
        if num_logits > 1:
            rows += [(slot, start + offset, 1, 1) for offset in range(num_logits)]
        else:
            rows.append((slot, start, count, num_logits))
    slots, starts, counts, num_logits = np.array(rows, np.int32).T
    return replace(plan, slots=slots, starts=starts, counts=counts, num_logits=num_logits)


def host_drafts(plan: StepPlan) -> IntColumn:
    """Return the draft token that follows each position with logits; NO_TOKEN if none does."""
    ends = np.cumsum(plan.num_logits)
    drafts = np.full(ends[-1], NO_TOKEN, np.int32)
    by_slot = {update.slot: update.token_ids for update in plan.draft_updates}
    for row in np.flatnonzero(plan.num_logits > 1).tolist():
        drafts[ends[row] - plan.num_logits[row] : ends[row] - 1] = by_slot[int(plan.slots[row])]
    return drafts


def count_valid(num_logits: IntColumn, tokens: IntColumn, drafts: IntColumn) -> IntColumn:
    """Return how many of each row's tokens are valid: all up to the first wrong draft token.

    Tokens and drafts are [positions]; a row's last position has no draft token.
    """
    ends = np.cumsum(num_logits)
    may_be_last = tokens != drafts
    may_be_last[ends[num_logits > 0] - 1] = True
    # A row's last valid token is the first of these that is not before the row's first token. Rows
    # without logits ignore what they find; for one at the end, the 0 keeps the index in range.
    firsts, lasts = ends - num_logits, np.flatnonzero(may_be_last)
    lasts = np.append(lasts, 0)[np.searchsorted(lasts, firsts)]
    return np.where(num_logits > 0, lasts - firsts + 1, 0)


def draft_changes(
    update: DraftUpdate, tokens_offset: int, length_offset: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes to the InputBatch: offsets of words, and their new values.

    The last two arguments are the offsets of the slot's tokens and of its length.
    """
    num_tokens, drafts = update.num_tokens, update.token_ids
    offsets, values = [length_offset], [num_tokens + len(drafts)]
    if NO_TOKEN not in drafts:
        begin = tokens_offset + num_tokens
        offsets += range(begin, begin + len(drafts))
        values += drafts
    return np.array(offsets), np.array(values, np.int32)
