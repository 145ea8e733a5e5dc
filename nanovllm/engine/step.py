"""The wire types between the engine core and its workers: columns per row, records per change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from nanovllm.sampling_params import SamplingParams

IntColumn = npt.NDArray[np.int32]
Vector = npt.NDArray[np.float32]
Pooling = Literal["last", "mean"]  # of the hidden states of a prompt's tokens
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pending(Generic[T]):
    """A lazy result: `result()` waits for the value, or raises the error that prevented it."""

    result: Callable[[], T]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence enters a slot: everything the device must know of it, sent once per admission."""

    slot: int
    token_ids: IntColumn  # all known tokens, prompt and output
    block_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # masked until params.min_tokens are out
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that must not follow one another
    pooling: Pooling | None = None  # instead of sampling

    @property
    def is_plain(self) -> bool:
        """Whether it is only sampled, by temperature, top_k, top_p and min_p."""
        return self.pooling is None and not self.bad_words and self.params.is_plain


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Entry `index` of a slot's block table becomes `block_id`."""

    slot: int
    index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block `target` gets the keys and values of block `source`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: row i runs counts[i] positions, from starts[i], of the sequence in slots[i].

    A token the host does not know yet is already in the slot's token table on the device.
    """

    slots: IntColumn
    starts: IntColumn
    counts: IntColumn
    num_logits: IntColumn  # last positions that reach the LM head: 1 to sample the next token
    new_rows: list[NewRow]
    block_updates: list[BlockUpdate]
    released: list[int]  # slots whose sequence left since the previous plan
    num_decode_tokens: int  # rows that run one token past their prompt
    masked_rows: IntColumn = field(default_factory=lambda: np.zeros(0, np.int32))  # see Executor
    block_copies: list[BlockCopy] = field(default_factory=list)  # before the step runs

    @property
    def num_prefill_tokens(self) -> int:
        return int(self.counts.sum()) - self.num_decode_tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the rows with num_logits > 0 sampled, in row order; what nobody asked for is None."""

    tokens: IntColumn  # [rows, tokens that each row gained]; NO_TOKEN: its logits are no numbers
    # Of the rows that ask for logprobs, if any: the sampled token, then the most likely ones.
    logprob_ids: IntColumn | None = None  # [rows, 1 + the most that a row asks for]
    logprobs: npt.NDArray[np.float32] | None = None
    logprob_ranks: IntColumn | None = None  # [rows], of the sampled token, from 1
    # The same of every prompt token that `num_scored` counts.
    prompt_logprob_ids: IntColumn | None = None
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    prompt_logprob_ranks: IntColumn | None = None
    # Of the rows that end a prompt whose hidden states are pooled: [rows, hidden_size].
    pooled: Vector | None = None
    # Rows whose logits processors failed, and how; they sampled NO_TOKEN.
    failures: dict[int, str] | None = None
    # The device could not finish the step: this result and those of later steps in flight are void.
    is_lost: bool = False


def num_scored(start: int, count: int, num_prompt_tokens: int) -> int:
    """Of a row that asks for prompt logprobs: how many of its positions foretell a prompt token.

    Those are its first ones; each foretells the token that follows it.
    """
    return max(0, min(start + count, num_prompt_tokens - 1) - start)


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What starting the workers discovered."""

    num_blocks: int
    depth: int  # the device's default
    device: str  # "cpu" or "cuda"
    dtype: str
    device_name: str = "unknown"  # what its maker calls it


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    def start(self) -> ExecutorInfo:
        """Build the workers and say what they found."""

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        """Launch a step without waiting for it; with masked rows it is not sampled yet."""

    def sample(self, masks: IntColumn) -> None:
        """Sample the plan submitted last, given a mask for each of its masked rows."""

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        """Return memory for masks; `sample` has read it once the step's result is there."""

    def capture_one(self) -> bool:
        """While idle: capture a graph that later requests may replay; False if none is missing."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""
