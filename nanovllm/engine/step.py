"""The records that the engine core and its workers exchange in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from nanovllm.engine.images import PromptImage
from nanovllm.sampling_params import SamplingParams

IntColumn = npt.NDArray[np.int32]
Vector = npt.NDArray[np.float32]
# How a prompt becomes one vector: the hidden state of its last token, the mean of all its hidden
# states, or the logits of two candidates for the next token.
Pooling = Literal["last", "mean"] | tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pending(Generic[T]):
    """A future: `result()` waits for the value, or raises the error that occurred."""

    result: Callable[[], T]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that enters a slot, with all the state that the device needs."""

    slot: int
    token_ids: IntColumn  # all known tokens, prompt and output
    # Block ids of each group of layers; a window's entries before its first block are undefined.
    tables: list[list[int]]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # masked until params.min_tokens tokens are generated
    bad_words: tuple[tuple[int, ...], ...] = ()  # forbidden sequences of token ids
    pooling: Pooling | None = None  # None: sample instead of pooling
    images: tuple[PromptImage, ...] = ()  # of the prompt

    @property
    def is_plain(self) -> bool:
        """Whether the row needs at most temperature, top_k, top_p, min_p and grammar bitmasks."""
        return self.pooling is None and not self.bad_words and self.params.is_plain


class BlockUpdate(NamedTuple):
    """A new entry in the block table of a slot and a group."""

    slot: int
    entry: int  # index in the table
    block_id: int
    group: int


@dataclass(frozen=True, slots=True)
class DraftUpdate:
    """Draft tokens to verify in a slot, written after the sequence's known tokens.

    Without draft tokens, the update resets the slot's length, which still counts rejected ones.
    """

    slot: int
    num_tokens: int  # number of known tokens of the sequence
    token_ids: list[int]  # all NO_TOKEN if the worker's draft model generates them


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy of recurrent state `source` to state `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Bitmasks:
    """The tokens that grammars allow in the plan submitted last.

    `words` [positions, words] has a row for each position with logits of each slot in `slots`, in
    the order of the plan. Bit i % 32 of word i // 32 is set if token i may come next.
    """

    slots: IntColumn
    words: IntColumn


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: row i runs counts[i] positions of the sequence in slots[i], starting at starts[i].

    A slot is the index of a sequence in the InputBatch, not a position in the KV cache as in
    `slot_mapping`. Tokens that the host does not know yet are already in the InputBatch.
    """

    slots: IntColumn
    starts: IntColumn
    counts: IntColumn
    # Number of trailing positions that need logits: 1 + draft tokens, or 0 to sample no token.
    num_logits: IntColumn
    new_rows: list[NewRow]
    block_updates: list[BlockUpdate]
    released: list[int]  # slots whose sequence left since the previous plan
    # Number of tokens after the prompts: output tokens, draft tokens, and tokens recomputed after a
    # preemption.
    num_decode_tokens: int
    needs_bitmasks: bool = False  # whether to sample only when `Executor.sample` is called
    draft_updates: list[DraftUpdate] = field(default_factory=list)
    state_copies: list[StateCopy] = field(default_factory=list)  # done in order, before the step

    @property
    def num_prefill_tokens(self) -> int:
        return int(self.counts.sum()) - self.num_decode_tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results for the positions that `num_logits` counts, row by row.

    `columns` holds what rows requested besides tokens, by name:

    - logprob_ids [positions, 1 + largest number of top logprobs], logprobs (the same shape) and
      logprob_ranks [positions], for the positions of rows that request logprobs: the sampled token,
      then the top tokens; ranks count from 1;
    - prompt_logprob_ids, prompt_logprobs and prompt_logprob_ranks: the same for prompt tokens, see
      `logprobs.num_scored`;
    - pooled [rows, dim]: a vector for each row that completes a pooled prompt. If its pooling is a
      pair of token ids, the first two values are their logits.
    """

    tokens: IntColumn  # [positions]; NO_TOKEN if the logits had no valid token
    # [rows]: how many of a row's tokens are valid, up to the first that differs from its draft
    # token. None: the plan has no draft tokens, so all of them are.
    num_valid: IntColumn | None = None
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    # Errors of logits processors, keyed by index into `tokens`, which has NO_TOKEN there.
    failures: dict[int, str] | None = None
    # The device could not finish the step: this result and later ones in flight are invalid.
    is_lost: bool = False
