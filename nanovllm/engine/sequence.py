"""Sequence, the scheduling state of one completion, and the queue of waiting sequences."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from nanovllm.engine.block_manager import BlockKey, BlockTable, Prefix
from nanovllm.engine.request import DraftCounts, FinishReason, Request, TokenLogprobs
from nanovllm.engine.step import Vector

if TYPE_CHECKING:
    from nanovllm.engine.feature import Feature

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence, owned and mutated by the scheduler.

    Each step moves `num_computed` toward `num_tokens`; prefill, decode and recomputation differ
    only in the distance. `num_tokens` includes tokens that are sampled but not yet known to the
    host; `token_ids` holds the known ones. A pooled prompt counts its vector as one such token,
    which takes no space in the KV cache.
    """

    request: Request
    seq_id: int = field(init=False)
    # Whether an output token ends the sequence; called once per token, as it advances a grammar.
    stops: Callable[[int], bool] = field(init=False)
    features: tuple[Feature, ...] = ()  # features that take part in scheduling this sequence
    is_streaming: bool = field(init=False)
    priority: int = field(init=False)
    request_id: str = field(init=False)
    may_hit: bool = field(init=False)  # whether it may reuse cached blocks
    is_serial: bool = field(init=False)  # runs only when the host knows all its tokens
    token_ids: array[int] = field(init=False)  # an array, because it is hashed and copied as bytes
    num_prompt_tokens: int = field(init=False)
    num_logits: int = field(init=False)  # 1 to sample after its last token; 0 if pooled
    num_tokens: int = field(init=False)
    max_len: int = field(init=False)
    is_cut_by_pool: bool = False  # whether the size of the KV cache limits `max_len`
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None  # message of a logits processor that failed
    start_time: float = 0.0  # when its first step was scheduled
    first_token_time: float = 0.0
    num_new: int = 0  # number of tokens that the last commit appended
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of these tokens, if requested
    # One entry per prompt token, from the second on.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # draft tokens that the step in flight verifies
    has_rejected: bool = False  # whether the device may still count rejected draft tokens
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    pooled: Vector | None = None

    slot: int = NO_SLOT
    num_computed: int = 0
    tables: list[BlockTable] = field(default_factory=list)  # of each group of layers; if running
    capacity: int = 0  # number of tokens that all tables can hold
    block_keys: list[BlockKey] = field(default_factory=list)  # keys of full blocks hashed so far
    prefix: Prefix | str | None = field(init=False)  # last prefix registered or matched
    next_full_len: int = 0  # number of computed tokens at which the next block is full
    shared_len: int = 0  # length of the prefix that was found at admission, reusable or not
    has_branch: bool = False  # whether another sequence continued this prefix differently

    def __post_init__(self) -> None:
        request = self.request
        self.seq_id, self.request_id = request.seq_id, request.request_id or str(request.seq_id)
        # With max_tokens=0, one token is sampled anyway, but not returned.
        self.is_streaming = request.is_streaming and request.params.max_tokens != 0
        self.priority, self.stops = request.params.priority, request.stop_token_ids.__contains__
        self.token_ids = array("i", request.token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        num_new = request.params.max_new_tokens if request.pooling is None else 1
        self.max_len = self.num_prompt_tokens + max(num_new, 1)
        self.num_logits = 1 if request.pooling is None else 0
        # Cached blocks are not recomputed, so their tokens have no logits and no hidden states.
        self.may_hit = request.params.prompt_logprobs is None and request.pooling != "mean"
        self.is_serial = bool(request.params.logits_processors)
        self.prefix = request.cache_salt

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks that it holds, group by group."""
        return [block_id for table in self.tables for block_id in table.held_block_ids]

    @property
    def num_pending(self) -> int:
        """Number of tokens that are sampled but not yet known to the host."""
        return self.num_tokens - len(self.token_ids)

    @property
    def new_token_ids(self) -> array[int]:
        """Tokens that the last commit appended."""
        return self.token_ids[len(self.token_ids) - self.num_new :]

    @property
    def output_token_ids(self) -> list[int]:
        """Generated token ids; empty if `max_tokens == 0`."""
        ids = self.token_ids[self.num_prompt_tokens :].tolist()
        return ids if self.request.params.max_tokens != 0 else []


class WaitingQueue:
    """Queue ordered by priority, lowest number first; requests of a priority take turns.

    A request with many prompts delays the others by one prompt, not by all of them. Requests with
    one prompt are served in order of arrival.
    """

    def __init__(self) -> None:
        # Priority, in ascending order -> request_id, in the order of turns -> seq_id, in order of
        # arrival. Empty dicts are removed.
        self._queues: dict[int, OrderedDict[str, OrderedDict[int, Sequence]]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for requests in self._queues.values():
            turns = [iter(prompts.values()) for prompts in requests.values()]
            for round_ in zip_longest(*turns):
                yield from (seq for seq in round_ if seq is not None)

    def add(self, seq: Sequence, is_first: bool = False) -> None:
        """Add a sequence after the others of its request.

        `is_first` adds it before all others of its priority.
        """
        if seq.priority not in self._queues:
            self._queues[seq.priority] = OrderedDict()
            self._queues = dict(sorted(self._queues.items()))
        requests = self._queues[seq.priority]
        prompts = requests.setdefault(seq.request_id, OrderedDict())
        prompts[seq.seq_id] = seq
        if is_first:
            prompts.move_to_end(seq.seq_id, last=False)
            requests.move_to_end(seq.request_id, last=False)
        self._num_waiting += 1

    def first(self, excluded: Container[str] = ()) -> Sequence | None:
        """Return the next sequence of a request whose id is not in `excluded`."""
        for requests in self._queues.values():
            for request_id, prompts in requests.items():
                if request_id not in excluded:
                    return next(iter(prompts.values()))
        return None

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence; the next turn is another request's."""
        requests = self._queues[seq.priority]
        prompts = requests.pop(seq.request_id)
        del prompts[seq.seq_id]
        if prompts:
            requests[seq.request_id] = prompts
        if not requests:
            del self._queues[seq.priority]
        self._num_waiting -= 1
