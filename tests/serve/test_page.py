"""The page's files, the engine's events and the trace, as HTTP clients see them."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

from nanovllm.engine.timing import SequenceEnd
from nanovllm.errors import EngineError
from nanovllm.serve.live import engine_events
from nanovllm.serve.live.engine_events import Trace
from nanovllm.serve.live.engine_state import EngineState, HeldBlocks, SequenceState
from nanovllm.serve.live.routes import PAGE_FOLDER
from tests.serve.fake_llm import IDLE, FakeLLM
from tests.serve.running import Running, running

FILES = sorted(path.name for path in PAGE_FOLDER.iterdir())


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running(FakeLLM(), api_key=("secret",)) as server:
        yield server


def first_event(server: Running, **headers: str) -> Any:
    with server.http.stream("GET", "/engine/events", headers=headers) as response:
        response.raise_for_status()
        assert response.headers["content-type"].startswith("text/event-stream")
        return json.loads(next(response.iter_lines()).removeprefix("data: "))


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_files_need_no_key_and_allow_nothing_from_elsewhere(guarded: Running, path: str) -> None:
    response = guarded.http.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert policy.split(";")[0] == "default-src 'self'"
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    suffix = ".html" if path == "/" else f".{path.rsplit('.', 1)[1]}"
    kinds = {".html": "text/html", ".css": "text/css", ".js": "javascript", ".svg": "image/svg+xml"}
    assert kinds[suffix] in response.headers["content-type"]


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/none.js",
        "/page/..%2fsnapshots.py",
        "/page/../snapshots.py",
        "/page//etc/passwd",
    ],
)
def test_there_are_no_other_files(guarded: Running, path: str) -> None:
    assert guarded.http.get(path).status_code in (401, 404)


@pytest.mark.parametrize("name", FILES)
def test_files_hold_no_inline_code_and_no_foreign_address(name: str) -> None:
    text = (PAGE_FOLDER / name).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
    assert not addresses
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def test_what_the_page_names_is_there() -> None:
    text = (PAGE_FOLDER / "index.html").read_text()
    named = set(re.findall(r'(?:href|src)="page/([\w.]+)', text))
    for path in PAGE_FOLDER.glob("*.js"):
        source = path.read_text()
        named |= set(re.findall(r'from "\./([\w.]+)"', source))
        ids = set(re.findall(r'find\("([\w-]+)"\)', source))
        assert all(f'id="{each}"' in text for each in ids), path.name
    assert named <= set(FILES)
    icons = (PAGE_FOLDER / "icons.svg").read_text()
    used = set(re.findall(r"icons\.svg#(\w+)", text))
    assert all(f'id="{name}"' in icons for name in used)


def test_events_and_traces_need_a_key(guarded: Running) -> None:
    for path in ("/engine/events", "/trace"):
        assert guarded.http.get(path).status_code == 401
    assert first_event(guarded, authorization="Bearer secret")["kind"] == "state"


def test_events_are_snapshots_that_follow_a_request(server: Running) -> None:
    body = {"prompt": [9] * 50, "max_tokens": 400, "ignore_eos": True}
    tokens, ended = 0, []
    with server.http.stream("GET", "/engine/events") as response:
        thread = threading.Thread(target=lambda: server.post("/v1/completions", **body))
        thread.start()
        for line in response.iter_lines():
            if not line:
                continue
            event = json.loads(line.removeprefix("data: "))
            assert event["kind"] == "state"
            assert len(base64.b64decode(event["cached"])) == event["num_blocks"]
            tokens += sum(step[7] + step[8] for step in event["steps"])
            ended += event["ended"]
            if ended:
                break
        thread.join()
    assert tokens > 100
    assert ended[0][1:3] == ["length", 400]


def test_a_trace_has_host_device_and_requests(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace covers the time from before a request until after it."""
    body = {"prompt": [8] * 50, "max_tokens": 100, "ignore_eos": True}
    has_begun, has_ended = threading.Event(), threading.Event()
    scopes: list[anyio.CancelScope] = []

    class WatchedTrace(Trace):
        def add(self, state: EngineState) -> None:
            super().add(state)
            has_begun.set()
            if state.ended:
                has_ended.set()

    def move_on_when_canceled(seconds: float) -> anyio.CancelScope:
        scopes.append(anyio.CancelScope())
        return scopes[0]

    timer = SimpleNamespace(move_on_after=move_on_when_canceled)
    monkeypatch.setattr(engine_events, "anyio", timer)
    monkeypatch.setattr(engine_events, "Trace", WatchedTrace)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.http.get("/trace")))
    thread.start()
    assert has_begun.wait(60)
    server.post("/v1/completions", **body)
    assert has_ended.wait(60)
    server.server.servers[0].get_loop().call_soon_threadsafe(scopes[0].cancel)
    thread.join()
    events = answers[0].json()["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {"schedule", "submit", "wait", "commit", "decode", "prefill"} <= {
        s["name"] for s in spans
    }
    assert all(span["dur"] >= 0 for span in spans)
    device = [span for span in spans if span["pid"] == 2]
    assert sum(span["args"]["prompt tokens"] for span in device) == 50
    for before, after in pairwise(device):
        assert before["ts"] + before["dur"] <= after["ts"] + 1  # both values are rounded
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named == {"host", "device", "requests"}


def test_a_trace_begins_with_the_oldest_request() -> None:
    """Perfetto drops events with negative timestamps."""
    old = SequenceState(7, "running", 5, 16, 0, 5, 6, 1_000, [HeldBlocks(0, [1])])
    end = SequenceEnd(7, "length", 11, 1_500, 2_000, 9_000, 1_000)
    llm = FakeLLM(idle=replace(IDLE, sequences=[old], ended=[end], time=8_000))
    with running(llm) as server:
        events = server.http.get("/trace?seconds=0.2").json()["traceEvents"]
    spans = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert spans == {
        "sequence 7": (0, 8_000),
        "queue": (0, 500),
        "prefill": (500, 500),
        "decode": (1_000, 7_000),
    }


def test_a_trace_ends_after_its_time(guarded: Running) -> None:
    headers = {"x-api-key": "secret"}
    answer = guarded.http.get("/trace?seconds=0.01", headers=headers).json()
    assert {event["ph"] for event in answer["traceEvents"]} == {"M"}


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "soon"])
def test_a_trace_of_no_or_endless_time_is_refused(guarded: Running, seconds: str) -> None:
    headers = {"x-api-key": "secret"}
    response = guarded.http.get(f"/trace?seconds={seconds}", headers=headers)
    assert response.status_code == 400


def test_watchers_learn_why_the_engine_ended() -> None:
    llm = FakeLLM()
    with running(llm) as server, server.http.stream("GET", "/engine/events") as response:
        lines = response.iter_lines()
        next(lines)
        llm.subscribers.end(EngineError("the core died"))
        rest = "".join(lines)
    assert "the core died" in rest


def test_watchers_do_not_hold_up_a_server_that_ends() -> None:
    llm = FakeLLM()
    begin = time.monotonic()
    with running(llm, shutdown_timeout=600.0) as server:
        thread = threading.Thread(
            target=lambda: httpx.get(f"{server.url}/engine/events", timeout=60)
        )
        thread.start()
        while not llm.subscribers._subscribers:
            time.sleep(0.01)
    thread.join(60)
    assert time.monotonic() - begin < 300
