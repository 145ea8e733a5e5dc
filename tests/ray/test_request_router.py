"""The request router of Ray Serve without a cluster: its choices and its counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
pytestmark = [pytest.mark.slow, needs_ray]

BLOCK_SIZE = 4


@dataclass(frozen=True)
class FakeReplica:
    """An idle replica."""

    replica_id: Any
    max_ongoing_requests: int = 8

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Engines:
    """A router and its engines."""

    def __init__(self, *names: str) -> None:
        from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

        from nanovllm.ray.router import PrefixRequestRouter

        deployment = DeploymentID("Engine")
        self.router = PrefixRequestRouter(
            deployment_id=deployment,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
        )
        self.router.initialize_state(block_size=BLOCK_SIZE)
        self.replicas = {name: FakeReplica(ReplicaID(name, deployment)) for name in names}
        self.have(*names)

    def have(self, *names: str) -> None:
        self.router.update_replicas([self.replicas[name] for name in names])

    async def choose(self, request: Any) -> str:
        candidates = list(self.router.curr_replicas.values())
        ranks = await self.router.choose_replicas(candidates, request)
        return str(ranks[0][0].replica_id.unique_id)

    def route(self, request: Any, name: str) -> None:
        self.router.on_request_routed(request, self.replicas[name].replica_id, None)

    def complete(self, request: Any, name: str) -> None:
        request_id = request.metadata.internal_request_id
        self.router.on_request_completed(self.replicas[name].replica_id, request_id)

    @property
    def loads(self) -> dict[str, int]:
        loads = self.router._prefixes.loads
        return {replica_id.unique_id: load for replica_id, load in loads.items()}


@pytest.fixture
def requests() -> Iterator[Any]:
    """Return a factory of requests, each with one output token."""
    from ray.serve._private.common import RequestMetadata
    from ray.serve.request_router import PendingRequest

    from nanovllm.ray.remote_llm import Call
    from nanovllm.sampling_params import SamplingParams

    made: list[Any] = []

    def make(*token_ids: int, **options: Any) -> Any:
        request_id = str(len(made))
        metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id)
        call = Call(list(token_ids), SamplingParams(max_tokens=1), **options)
        made.append(PendingRequest(args=[call], kwargs={}, metadata=metadata))
        return made[-1]

    return make


def test_a_prefix_stays_where_it_is(requests: Any) -> None:
    async def run() -> None:
        engines = Engines("a", "b")
        first = {letter: await engines.choose(requests(*[letter] * 8)) for letter in (1, 2, 3, 4)}
        assert sorted(first.values()) == ["a", "a", "b", "b"]
        for letter, name in first.items():
            assert await engines.choose(requests(*[letter] * 8, 9)) == name
        assert await engines.choose(requests(engine_id="b")) == "b"
        assert await engines.choose(requests(engine_id="gone")) in ("a", "b")

    asyncio.run(run())


def test_what_is_counted_is_counted_off(requests: Any) -> None:
    async def run() -> None:
        engines = Engines("a", "b")
        request = requests(1, 2, 3)
        chosen = await engines.choose(request)
        other = "b" if chosen == "a" else "a"
        assert engines.loads == {chosen: 4, other: 0}
        assert await engines.choose(request) == chosen  # retried because the engine was full
        assert engines.loads == {chosen: 4, other: 0}
        engines.route(request, other)
        assert engines.loads == {chosen: 0, other: 4}
        engines.complete(request, other)
        assert engines.loads == {"a": 0, "b": 0}

        canceled = requests(1, 2, 3)
        await engines.choose(canceled)
        canceled.future.cancel()
        await asyncio.sleep(0)  # lets the callbacks run
        assert engines.loads == {"a": 0, "b": 0}

    asyncio.run(run())


def test_engines_come_and_go(requests: Any) -> None:
    async def run() -> None:
        engines = Engines("a", "b", "c")
        engines.have("a")
        request, other = requests(*range(8)), requests(*range(8))
        assert await engines.choose(request) == "a"
        engines.have("a", "b")
        assert await engines.choose(other) == "a"
        engines.router.on_replica_actor_died(engines.replicas["a"].replica_id)
        engines.complete(request, "a")
        assert engines.loads == {"b": 0}
        assert await engines.choose(other) == "b"
        engines.route(other, "a")  # Serve notices too late that it is lost
        assert engines.loads == {"b": 0}

    asyncio.run(run())
