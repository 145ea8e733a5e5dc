"""Prefix-aware request router for Ray Serve."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanovllm.ray.remote_llm import Call
from nanovllm.serve.routing import PrefixRouter


class PrefixRequestRouter(RequestRouter):
    """Routes calls by prefix; Serve creates a router in each process that calls engines."""

    def initialize_state(self, **options: Any) -> None:
        self._prefixes: PrefixRouter[ReplicaID] = PrefixRouter((), **options)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the chosen replica first; if it is full, another one gets the request."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # retry later if all are full
        request_id, call = pending_request.metadata.internal_request_id, _call_of(pending_request)
        named = [each for each in candidate_replicas if each.replica_id.unique_id == call.engine_id]
        if named:
            return [named]
        self._prefixes.finished(request_id)  # undo the choice of an earlier attempt
        chosen = self._prefixes.choose(call.token_ids, call.cache_salt)
        self._prefixes.started(request_id, chosen, call.num_tokens)
        pending_request.future.add_done_callback(  # the request may be canceled before it is sent
            lambda future: self._prefixes.finished(request_id) if future.cancelled() else None
        )
        ranked = sorted(candidate_replicas, key=lambda each: each.replica_id != chosen)
        return [ranked[:1], ranked[1:]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Add the request to the load of the replica that took it; it may not be the chosen one."""
        request_id = pending_request.metadata.internal_request_id
        self._prefixes.started(request_id, replica_id, _call_of(pending_request).num_tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._prefixes.finished(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        current, known = [each.replica_id for each in replicas], self._prefixes.loads
        for replica_id in [each for each in known if each not in current]:
            self._prefixes.lost(replica_id)
        for replica_id in [each for each in current if each not in known]:
            self._prefixes.joined(replica_id)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._prefixes.lost(replica_id)


def _call_of(pending_request: PendingRequest) -> Call:
    """Return the request's `Call`, or an empty one, which goes to the least loaded replica."""
    first = next(iter(pending_request.args), None)
    return first if isinstance(first, Call) else Call()
