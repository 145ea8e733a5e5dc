"""A sequence (its tokens, its counts, its blocks), and the queue of those that wait to run."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from nanovllm.engine.block_manager import BlockKey, Prefix
from nanovllm.engine.grammar import Matcher
from nanovllm.engine.request import FinishReason, Request, TokenLogprobs
from nanovllm.engine.step import Vector

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed` chases `num_tokens`; prefill, decode and recompute are the same chase.

    `num_tokens` counts tokens that are sampled but not yet known to the host; `token_ids` holds
    only the known ones. A prompt that is pooled counts its vector as one such token, which has no
    place in the cache. The scheduler owns and mutates it.
    """

    request: Request
    seq_id: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    is_streaming: bool = field(init=False)
    priority: int = field(init=False)
    may_hit: bool = field(init=False)  # whether cached blocks spare it the computation
    is_serial: bool = field(init=False)  # runs only while the host knows all its tokens
    token_ids: array[int] = field(init=False)  # numpy and hashes read it as it is
    num_prompt_tokens: int = field(init=False)
    num_logits: int = field(init=False)  # of a row that reaches its last token
    num_tokens: int = field(init=False)
    max_len: int = field(init=False)
    is_cut_by_pool: bool = False  # the KV cache holds fewer tokens than it may have
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None  # of a processor of its own
    start_time: float = 0.0  # of its first step
    first_token_time: float = 0.0
    newest_logprobs: TokenLogprobs | None = None  # of its newest token, if it asks for them
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of all but its first token
    matcher: Matcher | None = None  # of its grammar, as far as the known tokens go
    is_dropped: bool = False  # what the step in flight samples for it
    pooled: Vector | None = None

    leader: Sequence | None = None  # the first sample of the prompt, whose blocks this one shares
    followers: dict[int, Sequence] = field(default_factory=dict)  # wait until its prompt is read

    slot: int = NO_SLOT
    num_computed: int = 0
    row_start: int = 0  # the first position of its newest row; 0 for the row with which it enters
    block_ids: list[int] = field(default_factory=list)
    capacity: int = 0  # tokens that block_ids can hold
    block_keys: list[BlockKey] = field(default_factory=list)  # of the full blocks hashed so far
    prefix: Prefix | str | None = field(init=False)  # the last one registered or matched
    next_full_len: int = 0  # number of computed tokens that completes the next block

    def __post_init__(self) -> None:
        request = self.request
        self.seq_id, self.is_streaming = request.seq_id, request.is_streaming
        self.stop_token_ids, self.priority = request.stop_token_ids, request.params.priority
        self.token_ids = array("i", request.token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        num_new = request.params.max_new_tokens if request.pooling is None else 1
        self.max_len = self.num_prompt_tokens + max(num_new, 1)
        self.num_logits = 1 if request.pooling is None else 0
        # The cache has neither logits nor hidden states of the tokens that it spares.
        self.may_hit = request.params.prompt_logprobs is None and request.pooling != "mean"
        self.is_serial = bool(request.params.logits_processors)
        self.prefix = request.cache_salt

    @property
    def num_pending(self) -> int:
        return self.num_tokens - len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Without the one that is sampled, for want of a shorter way, where none is asked for."""
        ids = self.token_ids[self.num_prompt_tokens :].tolist()
        return ids if self.request.params.max_tokens != 0 else []


class Waiting:
    """By priority, the lowest number first; among equals the preempted first, then as they came."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, Sequence]] = {}  # by priority, none empty
        self._priorities: list[int] = []  # the keys, in order
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            yield from self._queues[priority].values()

    def add(self, seq: Sequence, is_first: bool = False) -> None:
        """Put a sequence behind those of its priority, or before them."""
        if seq.priority not in self._queues:
            self._queues[seq.priority] = OrderedDict()
            insort(self._priorities, seq.priority)
        queue = self._queues[seq.priority]
        queue[seq.seq_id] = seq
        if is_first:
            queue.move_to_end(seq.seq_id, last=False)
        self._num_waiting += 1

    def first(self) -> Sequence:
        return next(iter(self._queues[self._priorities[0]].values()))

    def remove(self, seq: Sequence) -> None:
        queue = self._queues[seq.priority]
        del queue[seq.seq_id]
        if not queue:
            del self._queues[seq.priority]
            del self._priorities[bisect_left(self._priorities, seq.priority)]
        self._num_waiting -= 1
