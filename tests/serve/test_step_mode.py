"""Step mode: a paused engine runs one step at a time, and says what each step changed."""

from __future__ import annotations

import ast
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm import AsyncLLM
from nanovllm.engine.core import EngineCore
from nanovllm.engine.executor import Windows
from nanovllm.engine.timing import StepLog
from nanovllm.errors import EngineError
from nanovllm.features.latency.prompt_budget import MIN_PROMPT_TOKENS
from nanovllm.features.states.state_pool import StatePool
from nanovllm.parallel.child import Kind
from nanovllm.serve.live.engine_state import Change, EngineState
from nanovllm.serve.live.snapshots import take_snapshot
from nanovllm.serve.live.step_mode import FUNCTIONS, PlanRecorder, StepMode, _change
from tests.engine.test_fuzz import BLOCK_SIZE, build_core, make_requests, repeat_prompts
from tests.engine.test_fuzz import make_sequences as sequences_of
from tests.serve.byte_model import make_byte_model
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running
from tests.serve.test_observer import request, stats_of
from tests.serve.test_operations import wait_until

ROOT = Path(__file__).parents[2]


def stepped(
    rng: random.Random, caching: bool, windows: Windows = (None,)
) -> Iterator[tuple[EngineCore, EngineState]]:
    """Pause an engine with random requests in a small pool, and step it until it is done."""
    requests = make_requests(rng)
    core = build_core(
        num_blocks=len(windows) * rng.choice([9, 12, 20]),
        num_slots=rng.choice([2, 4, 8]),
        budget=rng.choice([3, 7, 32]),
        caching=caching,
        depth=0,
        is_paced=rng.random() < 0.5,
        num_snapshots=rng.choice([None, 3]) if caching else None,
        windows=windows,
    )
    mode, log = StepMode(core), StepLog()
    core.log = log
    repeat_prompts(rng, requests)
    sequences = sequences_of(requests)
    yield core, mode.explain(take_snapshot(core, log, stats_of(core), 0.0))
    while sequences or core.has_unfinished:
        while sequences and rng.random() < 0.5:
            core.add(sequences.pop(0).request)
        if rng.random() < 0.05 and core.has_unfinished:
            core.finish(rng.choice(list(core._sequences)), "abort")
        core.step()
        state = take_snapshot(core, log, stats_of(core), 0.0)
        pools = [each for each in core.scheduler.features if isinstance(each, StatePool)]
        assert state.snapshots == (list(pools[0].snapshots) if pools else None)
        yield core, mode.explain(state)
    mode.end()
    assert not any(isinstance(each, PlanRecorder) for each in core.scheduler.features)


def tables_of(state: EngineState) -> dict[int, list[int]]:
    return {seq.seq_id: seq.held_block_ids for seq in state.sequences if seq.status == "running"}


def cached_in(state: EngineState) -> set[int]:
    return {block for block, is_cached in enumerate(state.cached) if is_cached}


def changes_in(state: EngineState) -> list[Change]:
    assert state.paused is not None
    return state.paused.changes


def apply(before: EngineState, changes: list[Change]) -> tuple[dict[int, list[int]], set[int]]:
    """Return the block tables and the cached blocks that the changes of a step lead to."""
    tables, cached = dict(tables_of(before)), cached_in(before)
    for change in changes:
        match change.kind:
            case "preempted" | "postponed" | "finished":
                tables.pop(change.seq_id, None)
            case "admitted":
                tables[change.seq_id] = []
            case "shared" | "allocated":
                tables[change.seq_id] = [*tables[change.seq_id], *change.block_ids]
            case "evicted":
                cached.difference_update(change.block_ids)
            case "registered":
                cached.update(change.block_ids)
    return tables, cached


@pytest.mark.parametrize("caching", [True, False])
def test_the_changes_lead_from_one_snapshot_to_the_next(
    caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MIN_PROMPT_TOKENS, "cpu", 3)
    seen: Counter[str] = Counter()
    for seed in range(60):
        steps = stepped(random.Random(seed), caching)
        _, before = next(steps)
        for core, after in steps:
            changes = changes_in(after)
            assert apply(before, changes) == (tables_of(after), cached_in(after))
            blocks: dict[str, set[int]] = {kind: set() for kind in FUNCTIONS}
            for change in changes:
                blocks[change.kind].update(change.block_ids)
                seq = core._sequences.get(change.seq_id)
                if change.kind == "sampled" and seq is not None:
                    assert seq.token_ids[-1:].tolist() == change.token_ids
            held = {block for table in tables_of(after).values() for block in table}
            holding = {block for table in tables_of(before).values() for block in table}
            assert holding - held <= blocks["freed"]
            assert not blocks["freed"] & (held - blocks["allocated"])
            seen.update(change.kind for change in changes)
            before = after
    missing = {"postponed"} if caching else {"postponed", "shared", "evicted", "registered"}
    assert set(FUNCTIONS) - set(seen) == missing


def test_the_changes_account_for_what_windows_free() -> None:
    """A block that a window has passed is freed once no other sequence holds it."""
    num_freed = 0
    for seed in range(30):
        steps = stepped(random.Random(seed), True, (None, 6))
        _, before = next(steps)
        for core, after in steps:
            changes = changes_in(after)
            tables, cached = apply(before, changes)
            assert cached == cached_in(after)
            held = {block for table in tables_of(after).values() for block in table}
            assert held <= {block for table in tables.values() for block in table}
            freed = {i for each in changes if each.kind == "freed" for i in each.block_ids}
            was_held = {block for table in tables_of(before).values() for block in table}
            assert was_held - held <= freed
            running = {
                each.seq_id for each in changes if each.kind == "freed"
            } & core._sequences.keys()
            num_freed += len(running & tables_of(after).keys())
            before = after
    assert num_freed > 50


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_block_shows_the_tokens_whose_keys_it_holds(windows: Windows) -> None:
    """The fake executor stores token ids as keys."""
    num_cached = num_passed = 0
    for seed in range(20):
        for core, state in stepped(random.Random(seed), True, windows):
            assert state.paused is not None
            kv, tokens = core.executor.kv, state.paused.block_tokens
            for seq in state.sequences:
                assert state.paused.prompts[seq.seq_id] == [
                    *core._sequences[seq.seq_id].token_ids[:24]
                ]
                for table in seq.tables:
                    num_passed += table.first
                    for index, block_id in enumerate(table.block_ids, table.first):
                        start = index * BLOCK_SIZE
                        end = max(0, min(BLOCK_SIZE, seq.num_computed - start))
                        known = core._sequences[seq.seq_id].token_ids[start : start + end].tolist()
                        assert tokens[block_id][:end] == kv[block_id][:end].tolist() == known
            held = {block for table in tables_of(state).values() for block in table}
            for block_id in cached_in(state) - held:
                assert tokens[block_id] == kv[block_id].tolist()
                num_cached += 1
    assert num_cached > 50
    assert (num_passed > 50) == (len(windows) > 1)


def test_steps_without_a_snapshot_are_not_explained() -> None:
    core = build_core(num_blocks=9, num_slots=2, budget=32, caching=True, depth=0, is_paced=False)
    mode, log = StepMode(core), StepLog()
    core.log = log

    def changes() -> list[Change]:
        return changes_in(mode.explain(take_snapshot(core, log, stats_of(core), 0.0)))

    changes()
    core.add(request(0, num_tokens=3))
    for _ in range(3):
        core.step()
    assert not core.has_unfinished
    assert changes() == []
    core.add(request(1))
    core.step()
    assert "shared" in [change.kind for change in changes()]


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_function_that_is_named_is_in_that_file(kind: str) -> None:
    path, _, name = _change(kind, None).function.partition("::")
    assert path.startswith("nanovllm/engine/")
    body: Any = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        [found] = [each for each in body if getattr(each, "name", None) == part]
        body = found.body
    assert isinstance(found, ast.FunctionDef)


@pytest.fixture(scope="module")
def pausable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_byte_model(tmp_path_factory.mktemp("byte-model"))
    sizes = {"max_model_len": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 24}
    llm = AsyncLLM(folder, device="cpu", dtype="float32", depth=0, **sizes)
    try:
        with running(llm, allow_pause=True) as server:
            yield server
        llm.replicas[0].control("pause")
    finally:
        llm.close()


class Events:
    """The engine's events, read one by one."""

    def __init__(self, server: Running) -> None:
        self._stream = server.http.stream("GET", "/engine/events")

    def __enter__(self) -> Events:
        self._lines = self._stream.__enter__().iter_lines()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)

    def until(self, is_seen: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        for line in self._lines:
            if line and is_seen(event := json.loads(line.removeprefix("data: "))):
                return event
        raise AssertionError("the stream ended")


def kinds(event: dict[str, Any]) -> list[str]:
    return [change[0] for change in event["paused"]["changes"]]


def control(server: Running, action: str) -> None:
    response = server.http.post(f"/engine/{action}")
    assert response.json() == {"engine": 0, "is_paused": action != "resume"}


def in_background(server: Running, **body: Any) -> tuple[threading.Thread, list[httpx.Response]]:
    responses: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: responses.append(server.post("/v1/completions", **body))
    )
    thread.start()
    return thread, responses


def test_a_paused_engine_runs_a_step_at_a_time(pausable: Running) -> None:
    prompt = "The quick brown fox jumps over the lazy dog."
    with Events(pausable) as events:
        control(pausable, "pause")
        assert events.until(lambda event: event["paused"])["paused"]["changes"] == []
        thread, responses = in_background(
            pausable, prompt=prompt, max_tokens=5, ignore_eos=True, temperature=0
        )
        assert kinds(events.until(lambda event: event["queue"])) == ["queued"]
        control(pausable, "step")
        event = events.until(lambda event: event["paused"]["changes"])
        assert kinds(event) == ["admitted", "allocated", "scheduled", "registered", "sampled"]
        admitted, allocated, scheduled, registered, sampled = event["paused"]["changes"]
        assert scheduled[4] == f"prefill, positions 0 to {len(prompt) - 1}"
        blocks = allocated[3]
        assert (len(blocks), registered[3]) == (3, blocks[:2])
        texts = [event["paused"]["blocks"][str(block)] for block in blocks]
        assert texts == [prompt[:16], prompt[16:32], prompt[32:] + sampled[5]]
        [(seq_id, text)] = event["paused"]["prompts"].items()
        assert (text, admitted[2]) == (prompt[:24], int(seq_id))
        for num_tokens in (2, 3, 4):
            control(pausable, "step")
            event = events.until(lambda event: event["paused"]["changes"])
            assert (
                {"scheduled", "sampled"}
                <= set(kinds(event))
                <= {"scheduled", "sampled", "registered", "allocated"}
            )
            [sequence] = event["sequences"]
            assert sequence[6] == len(prompt) + num_tokens
        control(pausable, "step")
        event = events.until(lambda event: event["paused"]["changes"])
        assert kinds(event)[-2:] == ["finished", "freed"]
        thread.join()
        control(pausable, "resume")
        assert events.until(lambda event: event["paused"] is None)["allow_pause"] is True
    again = pausable.post(
        "/v1/completions", prompt=prompt, max_tokens=5, ignore_eos=True, temperature=0
    )
    assert responses[0].json()["choices"] == again.json()["choices"]


def test_a_paused_engine_is_healthy_and_frees_aborted_requests(
    pausable: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, heartbeats = pausable.llm.replicas[0]._supervisor, []
    handle = supervisor._handle

    def handle_and_count(number: int, event: Any) -> Any:
        if event[0] is Kind.HEARTBEAT:
            heartbeats.append(event[1])
        return handle(number, event)

    body = json.dumps({"prompt": "abc" * 20, "max_tokens": 90, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    address = "127.0.0.1", int(pausable.url.rpartition(":")[2])
    with Events(pausable) as events, socket.create_connection(address) as client:
        control(pausable, "pause")
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        events.until(lambda event: event["queue"])
        control(pausable, "step")
        event = events.until(lambda event: "sampled" in kinds(event))
        assert event["stats"]["num_free_blocks"] == 20
        monkeypatch.setattr(supervisor, "_handle", handle_and_count)
        wait_until(lambda: len(heartbeats) >= 2)
        assert heartbeats == [0.0] * len(heartbeats)  # no step is running
        assert pausable.http.get("/health").status_code == 200
        client.close()
        event = events.until(lambda event: event["paused"]["changes"])
        assert kinds(event) == ["finished", "freed"]
        assert event["stats"]["num_free_blocks"] == 24
        control(pausable, "step")  # nothing can run
        control(pausable, "resume")


def test_a_server_that_ends_resumes_its_engine(pausable: Running) -> None:
    with running(pausable.llm, allow_pause=True, shutdown_timeout=600.0) as server:
        control(server, "pause")
        thread, responses = in_background(server, prompt="abc", max_tokens=3, ignore_eos=True)
        wait_until(lambda: server.llm.stats.num_waiting == 1)
        server.server.should_exit = True  # as after SIGTERM
        thread.join()
    assert responses[0].json()["usage"]["completion_tokens"] == 3


def test_an_engine_can_be_paused_only_if_the_server_allows_it() -> None:
    llm = FakeLLM(others=[FakeLLM()])
    with running(llm) as server:
        for action in ("pause", "step", "resume"):
            response = server.http.post(f"/engine/{action}")
            assert response.status_code == 403
            assert response.json()["error"]["type"] == "permission_error"
            assert "--allow-pause" in response.json()["error"]["message"]
        with Events(server) as events:
            assert events.until(bool)["allow_pause"] is False
        assert llm.actions == []
    llm = FakeLLM(others=[FakeLLM()])
    with running(llm, allow_pause=True) as server:
        assert server.http.post("/engine/step?engine=1").json()["engine"] == 1
        assert (llm.actions, llm.others[0].actions) == ([], ["step"])
        for path in ("/engine/stop", "/engine/step?engine=2"):
            response = server.http.post(path)
            assert (response.status_code, "error" in response.json()) == (400, True)
        llm.others[0].error = EngineError("the core died")
        assert server.http.post("/engine/step?engine=1").status_code == 503
