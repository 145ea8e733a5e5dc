"""One request on its way through the engine: its tokens, its counts, its blocks."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field

from nanovllm.engine.block_manager import BlockKey, Prefix
from nanovllm.sampling_params import SamplingParams

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed` chases `num_tokens`; prefill, decode and recompute are the same chase.

    `num_tokens` counts tokens that are sampled but not yet known to the host; `token_ids` holds
    only the known ones. The scheduler owns and mutates it.
    """

    seq_id: int
    prompt_token_ids: InitVar[Iterable[int]]
    params: SamplingParams
    _: KW_ONLY
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    is_streaming: bool = False  # wants an output for every token, not only at the end

    token_ids: array[int] = field(init=False)  # numpy and hashes read it as it is
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    max_len: int = field(init=False)
    num_cached: int = 0
    finish_reason: str | None = None
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float = 0.0

    slot: int = NO_SLOT
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    capacity: int = 0  # tokens that block_ids can hold
    block_keys: list[BlockKey] = field(default_factory=list)  # of the full blocks hashed so far
    prefix: Prefix | str | None = field(init=False)  # the last one registered or matched
    next_full_len: int = 0  # number of computed tokens that completes the next block

    def __post_init__(self, prompt_token_ids: Iterable[int]) -> None:
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.max_len = self.num_prompt_tokens + self.params.max_tokens
        self.prefix = self.cache_salt

    @property
    def num_pending(self) -> int:
        return self.num_tokens - len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()
