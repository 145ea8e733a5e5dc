"""Log-probabilities as steps bring them: numbers side by side, which sequences keep as they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from nanovllm.engine.request import TokenLogprobs
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import IntColumn, StepPlan, StepResult, num_scored

# An entry, of one position, is a rank and pairs of a token id and a logprob, each number 4 bytes.
# The rank and the first pair are of its own token, the others of the likeliest ones. There are as
# many entries as tokens: as objects of Python they took longer than a step does on a device.
RANK_BYTES, PAIR_BYTES = 4, 8


def pack_logprobs(
    ids: IntColumn, logprobs: npt.NDArray[np.float32] | None, ranks: IntColumn | None
) -> Iterator[TokenLogprobs]:
    """Yield an entry for each row of ids and logprobs [rows, 1 + the likeliest]."""
    assert logprobs is not None
    assert ranks is not None
    pairs = np.stack((ids, logprobs.view(np.int32)), 2).reshape(len(ids), -1)
    packed = np.concatenate((ranks[:, None], pairs), 1, dtype=np.int32)
    data, width = packed.tobytes(), 4 * packed.shape[1]
    return (data[start : start + width] for start in range(0, len(data), width))


def entry_bytes(num_best: int | None) -> int:
    """Of an entry with so many of the likeliest; a step's may have more, as others ask for them."""
    return RANK_BYTES + PAIR_BYTES * (1 + (num_best or 0))


def add_logprobs(sampled: list[Sequence], result: StepResult) -> None:
    """Give the sequences that ask the log-probabilities of their newest tokens."""
    if result.logprob_ids is None:
        return
    asking = [seq for seq in sampled if seq.request.params.logprobs is not None]
    entries = pack_logprobs(result.logprob_ids, result.logprobs, result.ranks)
    for seq, entry in zip(asking, entries, strict=True):
        if seq.finish_reason is None and not seq.is_dropped:
            seq.newest_logprobs = entry[: entry_bytes(seq.request.params.logprobs)]


def add_prompt_logprobs(rows: list[Sequence], plan: StepPlan, result: StepResult) -> None:
    """Give the sequences that ask those of the prompt tokens that this step read past."""
    if result.prompt_ids is None:
        return
    entries = pack_logprobs(result.prompt_ids, result.prompt_logprobs, result.prompt_ranks)
    spans = zip(rows, plan.starts.tolist(), plan.counts.tolist(), strict=True)
    for seq, start, count in spans:
        num_best = seq.request.params.prompt_logprobs
        if num_best is None:
            continue
        for position in range(start, start + num_scored(start, count, seq.num_prompt_tokens)):
            entry = next(entries)
            if position == len(seq.prompt_logprobs):  # not so when it runs again after preemption
                seq.prompt_logprobs.append(entry[: entry_bytes(num_best)])
