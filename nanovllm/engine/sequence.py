"""One request on its way through the engine: its tokens, its counts, its blocks."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

from nanovllm.engine.block_manager import BlockKey, Prefix
from nanovllm.sampling_params import SamplingParams

NO_SLOT = -1


class Sequence:
    """`num_computed` chases `num_tokens`; prefill, decode and recompute are the same chase.

    `num_tokens` counts tokens that are sampled but not yet known to the host; `token_ids` holds
    only the known ones. The scheduler owns and mutates it.
    """

    __slots__ = (
        "arrival_time",
        "block_ids",
        "block_keys",
        "cache_salt",
        "capacity",
        "finish_reason",
        "first_token_time",
        "is_streaming",
        "max_len",
        "next_full_len",
        "num_cached",
        "num_computed",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "prefix",
        "seed",
        "seq_id",
        "slot",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        cache_salt: str | None = None,
        is_streaming: bool = False,
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = array("i", prompt_token_ids)  # numpy and hashes read it as it is
        self.params = params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.cache_salt = cache_salt
        self.is_streaming = is_streaming  # wants an output for every token, not only at the end

        self.num_prompt_tokens = len(self.token_ids)
        self.num_tokens = len(self.token_ids)
        self.max_len = self.num_prompt_tokens + params.max_tokens
        self.num_cached = 0
        self.finish_reason: str | None = None
        self.arrival_time = time.perf_counter()
        self.first_token_time = 0.0

        self.slot = NO_SLOT
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.capacity = 0  # tokens that block_ids can hold
        self.block_keys: list[BlockKey] = []  # of the full blocks hashed so far
        self.prefix: Prefix | str | None = cache_salt  # the last one registered or matched
        self.next_full_len = 0  # number of computed tokens that completes the next block

    @property
    def num_pending(self) -> int:
        return self.num_tokens - len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()
