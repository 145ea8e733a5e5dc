"""Feature: what a capability such as speculation or structured output adds to scheduling.

The scheduler calls features at fixed places of `schedule` and `commit`, and names none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.block_manager import Prefix
    from nanovllm.engine.scheduler import Scheduler, Step
    from nanovllm.engine.sequence import Sequence
    from nanovllm.engine.step import StepResult


class Feature:
    """The hooks of a capability into scheduling; by default, each does nothing.

    A feature keeps its own state, keyed by `seq_id`. It must not keep the scheduler, which refers
    to it: the cycle would live until a full garbage collection, which is rare.
    """

    # Called in every step.

    def begin_step(self, scheduler: Scheduler, step: Step) -> None:
        """Prepare to plan a step: resume postponed sequences, or lower its budgets.

        States and grammars resume, the latency target lowers, and speculation counts rows.
        """

    def planned(self, step: Step) -> None:
        """Add to a step whose rows are chosen.

        States add copies, grammars ask for bitmasks, speculation and step mode remember the rows.
        """

    def committed(self, step: Step, result: StepResult) -> None:
        """Learn from a step whose tokens have been appended.

        The latency target and speculation measure its duration, and step mode takes its tokens.
        """

    # Called only for the sequences for which `joins` has returned True.

    def joins(self, seq: Sequence) -> bool:
        """Return whether to take part in scheduling a sequence that is being added.

        Grammars join sequences with a grammar, speculation those that may get draft tokens, and
        states and the latency target all.
        """
        return False

    def is_ready(self, seq: Sequence) -> bool:
        """Return whether a sequence may enter the queue; if not, it is postponed.

        The feature then remembers it, and calls `Scheduler.resume` once it may, which asks all
        features again. Grammars wait for a compiler or a bitmask, and states for an earlier
        sequence with the same prompt.
        """
        return True

    def usable_hits(self, seq: Sequence, hits: list[Prefix]) -> list[Prefix]:
        """Return the leading blocks of a cached prefix that a sequence may reuse.

        It is called again if the result is shortened. States shorten the prefix to one with a
        snapshot.
        """
        return hits

    def row_end(self, seq: Sequence, end: int, limit: int) -> int:
        """Return where the sequence's next row ends, given the position found so far.

        - A lower `end` shortens the row: states end it where a snapshot is due, and the latency
          target limits prompts.
        - `seq.num_computed` leaves a running sequence out of the step: speculation lets it wait for
          its pending token, and the latency target for a later step.
        - An `end` after `seq.num_tokens` adds the draft tokens in `seq.drafts`, at most up to
          `limit`: speculation does so. No other feature lowers such an `end`.
        """
        return end

    def ended(self, seq: Sequence) -> None:
        """Discard what is kept for a sequence that has ended.

        States, grammars, speculation and the latency target keep something.
        """

    # Called by tests.

    def check(self, scheduler: Scheduler) -> None:
        """Verify the feature's invariants, as states do."""
