"""Which sampled tokens of a row with draft tokens are valid."""

from __future__ import annotations

import random

import numpy as np

from nanovllm.worker.draft_rows import count_valid


def test_tokens_are_valid_up_to_the_first_wrong_draft_token() -> None:
    rng = random.Random(0)
    for _ in range(200):
        num_logits = [rng.choice((0, 1, 1, 2, 5)) for _ in range(rng.randint(1, 6))]
        num_logits[rng.randrange(len(num_logits))] = 1  # a plan samples at least one row
        tokens, drafts, want = [], [], []
        for count in num_logits:
            row = [rng.randint(0, 2) for _ in range(count)]
            row_drafts = [rng.randint(0, 2) for _ in range(count)]
            valid = next((i + 1 for i in range(count - 1) if row[i] != row_drafts[i]), count)
            tokens += row
            drafts += row_drafts
            want.append(valid)
        columns = (np.array(column, np.int32) for column in (num_logits, tokens, drafts))
        assert count_valid(*columns).tolist() == want
