"""Prefix-aware routing: prefer the longest cached prefix of the prompt, then the lowest load."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nanovllm.engine.block_manager import BlockKey, add_keys
from nanovllm.errors import EngineError

# A replica is overloaded if its load exceeds MAX_RATIO times the lowest load plus MAX_EXTRA times
# the length of the new prompt; then its cached prefix does not count.
MAX_RATIO, MAX_EXTRA = 1.5, 6
# A load counts as the lowest if it exceeds the lowest by at most SIMILAR times the prompt's length.
SIMILAR = 2


R = TypeVar("R", bound=Hashable)  # identifies a replica


class PrefixRouter(Generic[R]):
    """Chooses replicas by their load and by the prompts sent to them before. Not thread-safe."""

    def __init__(self, replicas: Iterable[R], block_size: int, max_blocks: int = 2**16) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks  # blocks remembered per replica: its KV-cache capacity
        self._replicas = {replica: ReplicaLoad() for replica in replicas}
        self._requests: dict[Hashable, tuple[R, int]] = {}  # request id -> (replica, num_tokens)

    @property
    def loads(self) -> dict[R, int]:
        """Number of tokens in progress, keyed by replica."""
        return {replica: each.load for replica, each in self._replicas.items()}

    def choose(self, token_ids: Sequence[int], salt: str | None = None) -> R:
        """Return the replica with the longest cached prefix among those that are not overloaded.

        That replica is assumed to cache the whole prompt from now on.
        """
        if not self._replicas:
            raise EngineError("no replica is available")
        hashes = self._hashes(token_ids, salt)
        least = min(replica.load for replica in self._replicas.values())
        most = MAX_RATIO * least + MAX_EXTRA * len(token_ids)

        def rank(replica: R) -> tuple[bool, int, int, int]:
            load = self._replicas[replica].load
            num_known = self._replicas[replica].num_known(hashes)
            # Among replicas whose loads count as the lowest, prefer the one with the fewest known
            # blocks: this spreads the prefixes.
            extra = max(load - least - SIMILAR * len(token_ids), 0)
            return load > most, -num_known, extra, len(self._replicas[replica].blocks)

        chosen = min(self._replicas, key=rank)
        self._replicas[chosen].remember(hashes, self.max_blocks)
        return chosen

    def started(self, request_id: Hashable, replica: R, num_tokens: int) -> None:
        """Add a request to a replica's load; `num_tokens` includes the expected output tokens."""
        self.finished(request_id)
        if replica in self._replicas:
            self._requests[request_id] = replica, num_tokens
            self._replicas[replica].load += num_tokens

    def finished(self, request_id: Hashable) -> None:
        """Remove a request from its replica's load; no effect if the replica was lost."""
        if request_id in self._requests:
            replica, num_tokens = self._requests.pop(request_id)
            self._replicas[replica].load -= num_tokens

    def lost(self, replica: R) -> None:
        """Remove a replica, its load and its known prefixes."""
        self._replicas.pop(replica, None)
        self._requests = {i: each for i, each in self._requests.items() if each[0] != replica}

    def joined(self, replica: R) -> None:
        """Add a new or restarted replica, whose cache is empty."""
        self._replicas[replica] = ReplicaLoad()

    def _hashes(self, token_ids: Sequence[int], salt: str | None) -> list[int]:
        keys: list[BlockKey] = []
        ids = array("i", token_ids)
        add_keys(keys, ids.tobytes(), self.block_size * ids.itemsize, salt)
        return [key.hash for key in keys]


@dataclass(slots=True)
class ReplicaLoad:
    load: int = 0  # number of tokens in progress
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # block hashes, LRU order

    def num_known(self, hashes: list[int]) -> int:
        """Return how many leading blocks of a prompt the replica is assumed to have cached."""
        return next((i for i, each in enumerate(hashes) if each not in self.blocks), len(hashes))

    def remember(self, hashes: list[int], max_blocks: int) -> None:
        # Reverse order, as in the prefix cache: the tail of a prefix is forgotten before its head.
        for each in reversed(hashes):
            self.blocks[each] = None
            self.blocks.move_to_end(each)
        while len(self.blocks) > max_blocks:
            self.blocks.popitem(last=False)
