"""NgramProposer: propose the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.features.speculation.proposer import NUM_CLASSES, Proposal

ORDER = 3  # minimum length of a match, in tokens
MAX_CANDIDATES = 8  # number of earlier occurrences that are compared, latest first
MAX_COMPARED = 32  # matches are compared up to this number of tokens
FACTOR = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1
MAX_STORED = 1 << 16  # number of tokens after which a store starts a new generation
MAX_STORES = 8  # maximum number of stores, one per cache salt
SEPARATOR = -1  # between outputs in a store; never proposed


class NgramProposer:
    """Searches the sequence itself and, with `has_store`, recent outputs with the same salt."""

    def __init__(self, has_store: bool) -> None:
        self._has_store = has_store
        self._indices: dict[int, MatchIndex] = {}  # keyed by seq_id
        self._stores: OrderedDict[str | None, OutputStore] = OrderedDict()  # keyed by cache salt

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        """Return the tokens after the longest match, or None if there is no match."""
        own = self._indices.setdefault(seq.seq_id, MatchIndex())
        own.extend(seq.token_ids[len(own.tokens) :])
        indices = [own]
        if seq.request.cache_salt in self._stores:
            indices += self._stores[seq.request.cache_salt].generations
        context = seq.token_ids[-MAX_COMPARED:]
        found = [(match, index) for index in indices if (match := index.find(context))]
        if not found:
            return None
        match, index = max(found, key=lambda pair: pair[0].length)
        drafts = index.tokens[match.start : match.start + most].tolist()
        if index is own:
            period = len(own.tokens) - match.start
            while len(drafts) < most:  # too few tokens follow: repeat them
                drafts.append(drafts[-period])
        elif SEPARATOR in drafts:
            drafts = drafts[: drafts.index(SEPARATOR)]
        if not drafts:
            return None
        return Proposal(drafts, min(match.length.bit_length() - 2, NUM_CLASSES - 1))

    def finished(self, seq: Sequence) -> None:
        """Discard the index of a sequence and, with `has_store`, store its output."""
        self._indices.pop(seq.seq_id, None)
        output = seq.token_ids[seq.num_prompt_tokens :]
        if self._has_store and output:
            salt = seq.request.cache_salt
            self._stores.setdefault(salt, OutputStore()).add(output)
            self._stores.move_to_end(salt)
            if len(self._stores) > MAX_STORES:
                self._stores.popitem(last=False)


class OutputStore:
    """Recent outputs, in two generations: the older one is dropped as a whole."""

    def __init__(self) -> None:
        self.generations = [MatchIndex()]

    def add(self, token_ids: array[int]) -> None:
        if len(self.generations[0].tokens) > MAX_STORED:
            self.generations = [MatchIndex(), self.generations[0]]
        token_ids.append(SEPARATOR)
        self.generations[0].extend(token_ids)


class Match(NamedTuple):
    """An earlier occurrence: `start` is the position after it, `length` the number of tokens."""

    start: int
    length: int


class MatchIndex:
    """Indexes positions by the ORDER tokens before them; appending takes constant time.

    As in LZ77 compressors, positions with equal hashes form a chain, latest first. Hashes may
    collide: `find` compares the tokens themselves.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self._heads: dict[int, int] = {}  # hash -> latest position
        # position -> the previous one in its chain, or -1; the first ORDER ones are in no chain.
        self._previous = array("i", [-1] * ORDER)

    def extend(self, token_ids: array[int]) -> None:
        """Append tokens; every position up to the new end can then be found."""
        self.tokens.extend(token_ids)
        first = len(self._previous)
        if len(self.tokens) - first > ORDER:
            words = np.array(self.tokens[first - ORDER :]).astype(np.uint64)
            hashes = hash_windows(words).tolist()
        else:
            ends = range(first, len(self.tokens) + 1)
            hashes = [hash_tokens(self.tokens[end - ORDER : end]) for end in ends]
        for position, key in enumerate(hashes, first):
            self._previous.append(self._heads.get(key, -1))
            self._heads[key] = position

    def find(self, context: array[int]) -> Match | None:
        """Return the longest match with the end of `context`; of equal lengths, the latest."""
        if len(context) < ORDER:
            return None
        position = self._heads.get(hash_tokens(context[-ORDER:]), -1)
        best = None
        for _ in range(MAX_CANDIDATES):
            if position == -1:
                break
            if position < len(self.tokens):  # else nothing follows
                length = self._num_equal(context, position)
                if length >= ORDER and (best is None or length > best.length):
                    best = Match(position, length)
            position = self._previous[position]
        return best

    def _num_equal(self, context: array[int], end: int) -> int:
        """Return how many tokens before `end` match the end of `context`."""
        tokens, most = self.tokens, min(end, len(context), MAX_COMPARED)
        for count in range(most):
            if tokens[end - 1 - count] != context[-1 - count]:
                return count
        return most


def hash_tokens(token_ids: array[int]) -> int:
    key = 0
    for token_id in token_ids:
        key = (key * FACTOR + token_id) & WORD
    return key


def hash_windows(token_ids: np.ndarray) -> np.ndarray:
    """Return `hash_tokens` of every window of ORDER tokens."""
    num_windows = len(token_ids) - ORDER + 1
    keys = np.zeros(max(num_windows, 0), np.uint64)
    for offset in range(ORDER):
        keys = keys * np.uint64(FACTOR) + token_ids[offset : offset + num_windows]
    return keys
