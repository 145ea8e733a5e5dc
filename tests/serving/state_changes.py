"""The engine's state as a watcher has it: a snapshot, and what changes since."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.serving.state_records import EngineChange, EngineNews, EngineState


def apply(state: EngineState | None, news: EngineNews) -> EngineState:
    if isinstance(news, EngineState):
        return news
    assert state is not None, "changes before a snapshot"
    return _changed(state, news)


def _changed(state: EngineState, change: EngineChange) -> EngineState:
    sequences = {seq.seq_id: seq for seq in state.sequences}
    for seq in change.sequences:
        sequences[seq.seq_id] = seq
    for start in range(0, len(change.progress), 3):
        seq_id, num_computed, num_tokens = change.progress[start : start + 3]
        changes = {"num_computed": num_computed, "num_tokens": num_tokens}
        sequences[seq_id] = sequences[seq_id]._replace(**changes)
    for seq_id, block_ids in change.grown:
        old = sequences[seq_id]
        sequences[seq_id] = old._replace(block_ids=[*old.block_ids, *block_ids])
    for seq_id in change.gone:
        del sequences[seq_id]
    assert not set(change.cached) & set(state.cached)
    assert set(change.uncached) <= set(state.cached)
    return replace(
        state,
        sequences=list(sequences.values()),
        queue=state.queue if change.queue is None else change.queue,
        cached=sorted({*state.cached, *change.cached} - {*change.uncached}),
        stats=change.stats,
        time=change.time,
    )


def comparable(state: EngineState) -> EngineState:
    """Without what two equal states may differ in: the past, and the order of sequences."""
    return replace(state, sequences=sorted(state.sequences), steps=[], ended=[], time=0)
