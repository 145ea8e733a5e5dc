"""How Ray Serve chooses the replica for a request: by the blocks that its prompt begins with."""

from __future__ import annotations

import itertools
from asyncio import Future
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanovllm.ray.remote_llm import Call
from nanovllm.serving.routing import PrefixRouter


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request is counted."""

    number: int
    num_tokens: int


class PrefixRequestRouter(RequestRouter):
    """Serve makes one in each process that sends requests to engines, which is the ingress."""

    def initialize_state(self, **options: Any) -> None:
        self._prefixes = PrefixRouter(0, **options)
        self._numbers: dict[ReplicaID, int] = {}
        self._next_numbers = itertools.count()
        self._routes: dict[str, Route] = {}  # by the request's id

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the chosen replica before the others, which get the request if that one is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # when all of them are full
        by_number = {self._numbers[each.replica_id]: each for each in candidate_replicas}
        request_id, call = pending_request.metadata.internal_request_id, _call_of(pending_request)
        named = [each for each in candidate_replicas if each.replica_id.unique_id == call.engine_id]
        if named:
            return [named]
        self._end(request_id)  # what an earlier try had chosen
        number = self._prefixes.choose(call.token_ids, call.cache_salt)
        self._begin(request_id, number, call.num_tokens)
        pending_request.future.add_done_callback(
            lambda future: self._end_if_cancelled(request_id, future)
        )
        chosen = by_number.pop(number)
        return [[chosen], list(by_number.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count the request where it went, which may be another replica than the one chosen."""
        request_id = pending_request.metadata.internal_request_id
        self._end(request_id)
        if replica_id in self._numbers:
            number = self._numbers[replica_id]
            self._begin(request_id, number, _call_of(pending_request).num_tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._end(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        there = [each.replica_id for each in replicas]
        for replica_id in [each for each in self._numbers if each not in there]:
            self._lose(replica_id)
        for replica_id in [each for each in there if each not in self._numbers]:
            self._numbers[replica_id] = next(self._next_numbers)
            self._prefixes.joined(self._numbers[replica_id])
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._lose(replica_id)

    def _lose(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            self._prefixes.lost(number)
            self._routes = {i: route for i, route in self._routes.items() if route.number != number}

    def _begin(self, request_id: str, number: int, num_tokens: int) -> None:
        self._routes[request_id] = Route(number, num_tokens)
        self._prefixes.started(number, num_tokens)

    def _end(self, request_id: str) -> None:
        route = self._routes.pop(request_id, None)
        if route is not None:
            self._prefixes.finished(route.number, route.num_tokens)

    def _end_if_cancelled(self, request_id: str, future: Future[RunningReplica]) -> None:
        if future.cancelled():  # before it was sent anywhere
            self._end(request_id)


def _call_of(pending_request: PendingRequest) -> Call:
    """The call of a prompt; what has none goes to the least loaded."""
    first = next(iter(pending_request.args), None)
    return first if isinstance(first, Call) else Call()
