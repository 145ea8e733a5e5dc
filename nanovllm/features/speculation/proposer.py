"""The interface of proposers, which propose draft tokens, and the proposer for draft models."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import NO_TOKEN

NUM_CLASSES = 4  # number of values of `Proposal.certainty`


class Proposal(NamedTuple):
    """Draft tokens for a sequence."""

    token_ids: list[int]
    certainty: int  # 0 to NUM_CLASSES - 1; acceptance is also averaged per value


class Proposer(Protocol):
    """Proposes draft tokens for a sequence, given the tokens known so far, `seq.token_ids`."""

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        """Return up to `most` draft tokens, or None to propose none."""

    def finished(self, seq: Sequence) -> None:
        """Discard the state of a sequence that has ended, if there is any."""


class ModelProposer:
    """Leaves drafting to the worker's draft model: the host only counts the draft tokens."""

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        """Return placeholders, or None with a grammar: bitmasks depend on the draft tokens."""
        return None if seq.request.grammar is not None else Proposal([NO_TOKEN] * most, 0)

    def finished(self, seq: Sequence) -> None:
        """Do nothing: there is no state on the host."""
