"""Fields of requests: used, ignored, refused or unknown, in each API."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running

USER = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
EFFORT = {"effort": "low", "summary": "auto", "context": "x", "new": 1}
# What the three agents and other chat clients send.
IGNORED = [
    ("/v1/responses", {"client_metadata": {"a": "b"}, "text": {"verbosity": "low"}}),
    ("/v1/responses", {"stream_options": {"reasoning_summary_delivery": "x"}, "reasoning": EFFORT}),
    ("/v1/responses", {"prompt_cache_key": "x", "store": False, "include": ["x"]}),
    ("/v1/messages", {"context_management": {"edits": []}, "metadata": {}, "speed": "fast"}),
    ("/v1/messages", {"mcp_servers": [{}], "container": {}, "inference_geo": "x", "betas": ["x"]}),
    ("/v1/messages", {"thinking": {"type": "adaptive", "display": "omitted", "new": 1}}),
    ("/v1/chat/completions", {"verbosity": "low", "prompt_cache_retention": "24h", "usage": {}}),
    ("/v1/chat/completions", {"provider": {}, "modalities": ["text"], "cache_prompt": True}),
    ("/v1/chat/completions", {"reasoning": EFFORT, "thinking": {"type": "enabled"}}),
    ("/v1/chat/completions", {"messages": [{**USER[0], "reasoning_details": [{}]}]}),
]
REFUSED = [
    ("/v1/chat/completions", {"no_such_field": 1}, "no_such_field"),
    ("/v1/chat/completions", {"functions": []}, "functions"),
    ("/v1/responses", {"previous_response_id": "x"}, "previous_response_id"),
    ("/v1/responses", {"structured_outputs": {"regex": "x"}}, "structured_outputs"),
    ("/v1/messages", {"seed": 1}, "seed"),
    ("/v1/messages", {"output_config": {"task_budget": {}}}, "output_config.task_budget"),
]


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM()) as server:
        yield server


def prompt_of(fake: Running) -> str:
    return str(fake.llm.input_processor.tokenizer.decode(fake.llm.asked[-1][0]))


@pytest.mark.parametrize(("path", "fields"), IGNORED, ids=str)
def test_hints_are_ignored(fake: Running, path: str, fields: dict[str, Any]) -> None:
    response = fake.post(path, **{**BODIES[path], **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=str)
def test_what_changes_the_output_is_refused(
    fake: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    response = fake.post(path, **{**BODIES[path], **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(f"{param} is not supported")
    assert error.get("param", param) == param


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_unknown_fields_are_logged_once(
    fake: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = dict(BODIES[path.removesuffix("/count_tokens")])
    name = f"new_field_of_{path}"
    with caplog.at_level(logging.INFO, "nanovllm.serve.fields"):
        for _ in range(3):
            assert fake.post(path, **body, **{name: 1}).status_code == 200
    (record,) = [record for record in caplog.records if name in record.message]
    assert record.levelno == logging.WARNING


def test_a_request_cannot_fill_the_log(fake: Running, caplog: pytest.LogCaptureFixture) -> None:
    unknown = {f"flood{i}": 1 for i in range(1000)}
    with caplog.at_level(logging.INFO, "nanovllm.serve.fields"):
        assert fake.post("/v1/responses", input="x", **unknown).status_code == 200
    assert len(caplog.records) < 20


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"reasoning": {"effort": "none"}}),
        ("/v1/chat/completions", {"enable_thinking": False, "reasoning_effort": "high"}),
        ("/v1/chat/completions", {"thinking": {"type": "disabled"}}),
        ("/v1/responses", {"reasoning": {"effort": "none"}}),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}),
    ],
    ids=str,
)
def test_switches_of_reasoning_are_used(fake: Running, path: str, fields: dict[str, Any]) -> None:
    assert fake.post(path, **BODIES[path], **fields).status_code == 200
    assert prompt_of(fake).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
def test_token_limits_are_clamped_to_the_room_left(fake: Running, path: str, name: str) -> None:
    assert fake.post(path, **{**BODIES[path], name: 128_000}).status_code == 200
    prompt, params = fake.llm.asked[-1]
    assert params.max_tokens == 1024 - len(prompt)
    assert fake.post(path, **{**BODIES[path], name: 5}).status_code == 200
    assert fake.llm.asked[-1][1].max_tokens == 5


@pytest.mark.parametrize("path", BODIES)
def test_a_choice_of_tools_may_come_without_tools(fake: Running, path: str) -> None:
    choice: Any = {"type": "auto"} if path == "/v1/messages" else "auto"
    body = {**BODIES[path], "tools": [], "tool_choice": choice}
    assert fake.post(path, **body).status_code == 200
