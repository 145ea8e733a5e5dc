"""Logprobs, from the arrays of a step to the dicts of a completion."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from nanovllm.engine.logprobs import CompletionLogprobs, TokenTexts, entry_bytes, pack_logprobs
from nanovllm.outputs import Logprob

IDS = np.array([[7, 3, 9], [4, 4, 8]], np.int32)  # the token itself, then the top tokens
LOGPROBS = np.array([[-2.5, -0.25, -1.0], [-0.5, -0.5, -3.0]], np.float32)
RANKS = np.array([5, 1], np.int32)
DICTS = [
    {7: Logprob(-2.5, 5, None), 3: Logprob(-0.25, 1, None), 9: Logprob(-1.0, 2, None)},
    {4: Logprob(-0.5, 1, None), 8: Logprob(-3.0, 2, None)},
]


def answer(num_top: int = 2, num_tokens: int = 2) -> CompletionLogprobs:
    columns = {"logprob_ids": IDS, "logprobs": LOGPROBS, "logprob_ranks": RANKS}
    entries = [*pack_logprobs(columns)][:num_tokens]
    return CompletionLogprobs(
        [entry[: entry_bytes(num_top)] for entry in entries], num_top, TokenTexts(None)
    )


def test_it_equals_a_list() -> None:
    found, wanted = answer(), [*DICTS]
    assert found == wanted
    assert wanted == found  # calls `list.__eq__` first
    assert [*found] == DICTS
    assert (len(found), found[-1], found[1:]) == (2, DICTS[1], DICTS[1:])
    assert found != DICTS[:1]
    assert repr(found) == repr(DICTS)
    with pytest.raises(IndexError):
        found[2]


def test_fewer_than_another_row_asked_for() -> None:
    assert answer(num_top=1) == [{7: DICTS[0][7], 3: DICTS[0][3]}, {4: DICTS[1][4]}]
    assert answer(num_top=0) == [{7: DICTS[0][7]}, {4: DICTS[1][4]}]


def test_the_sum_is_of_the_tokens_themselves() -> None:
    assert [answer(num_top).cumulative for num_top in (0, 1, 2)] == [-3.0] * 3
    assert answer(num_tokens=0).cumulative == 0.0
    assert answer(num_tokens=0) == []


def test_copies_are_lists() -> None:
    """Lists can be sent to processes that have no tokenizer."""
    for copied in (pickle.loads(pickle.dumps(answer())), copy.deepcopy(answer())):
        assert type(copied) is list
        assert copied == DICTS
