"""Which of several engines a request goes to: where its prefix is cached, or the least loaded."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nanovllm.engine.block_manager import BlockKey, add_keys
from nanovllm.errors import EngineError

# A replica keeps its prefixes as long as it has at most so many times the tokens of the least
# loaded one, and so many requests like the new one beside.
MAX_RATIO, MAX_EXTRA = 1.5, 6
SIMILAR = 2  # requests like the new one: those with no more beside the least have as little to do


R = TypeVar("R", bound=Hashable)  # what identifies a replica


class PrefixRouter(Generic[R]):
    """Guesses what each replica has cached by what it was sent. Its owner sees to the locking."""

    def __init__(self, replicas: Iterable[R], block_size: int, max_blocks: int = 2**16) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks  # that are remembered of each: what its cache has room for
        self._replicas = {replica: ReplicaLoad() for replica in replicas}
        self._requests: dict[Hashable, tuple[R, int]] = {}  # where each runs, and its tokens

    @property
    def loads(self) -> dict[R, int]:
        """The tokens under way at each replica that is there."""
        return {replica: each.load for replica, each in self._replicas.items()}

    def choose(self, token_ids: Sequence[int], salt: str | None = None) -> R:
        """Return the replica with the longest known prefix, unless others have far less to do."""
        if not self._replicas:
            raise EngineError("no replica is left to answer")
        hashes = self._hashes(token_ids, salt)
        least = min(replica.load for replica in self._replicas.values())
        most = MAX_RATIO * least + MAX_EXTRA * len(token_ids)

        def rank(replica: R) -> tuple[bool, int, int, int]:
            load = self._replicas[replica].load
            num_known = self._replicas[replica].num_known(hashes)
            # Where loads are similar, who remembers least takes it: prefixes spread.
            extra = max(load - least - SIMILAR * len(token_ids), 0)
            return load > most, -num_known, extra, len(self._replicas[replica].blocks)

        chosen = min(self._replicas, key=rank)
        self._replicas[chosen].remember(hashes, self.max_blocks)
        return chosen

    def started(self, request_id: Hashable, replica: R, num_tokens: int) -> None:
        """Count a request where it went: its prompt and, as far as can be guessed, its answer."""
        self.finished(request_id)
        if replica in self._replicas:
            self._requests[request_id] = replica, num_tokens
            self._replicas[replica].load += num_tokens

    def finished(self, request_id: Hashable) -> None:
        """Count a request off, if it is counted: those of a lost replica are not."""
        if request_id in self._requests:
            replica, num_tokens = self._requests.pop(request_id)
            self._replicas[replica].load -= num_tokens

    def lost(self, replica: R) -> None:
        """Send nothing more there, and forget what it had."""
        self._replicas.pop(replica, None)
        self._requests = {i: each for i, each in self._requests.items() if each[0] != replica}

    def joined(self, replica: R) -> None:
        """A new one is there, or another one in the place of one that was lost: it has nothing."""
        self._replicas[replica] = ReplicaLoad()

    def _hashes(self, token_ids: Sequence[int], salt: str | None) -> list[int]:
        keys: list[BlockKey] = []
        ids = array("i", token_ids)
        add_keys(keys, ids.tobytes(), self.block_size * ids.itemsize, salt)
        return [key.hash for key in keys]


@dataclass(slots=True)
class ReplicaLoad:
    load: int = 0  # tokens under way
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # hashes, newest last

    def num_known(self, hashes: list[int]) -> int:
        """How many leading blocks it has."""
        return next((i for i, each in enumerate(hashes) if each not in self.blocks), len(hashes))

    def remember(self, hashes: list[int], max_blocks: int) -> None:
        # Reverse order, as in the cache: the tail of a prefix is forgotten before its head.
        for each in reversed(hashes):
            self.blocks[each] = None
            self.blocks.move_to_end(each)
        while len(self.blocks) > max_blocks:
            self.blocks.popitem(last=False)
