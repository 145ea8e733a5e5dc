"""/v1/messages: Anthropic's content blocks and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.errors import EngineError
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REQUEST: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Weather in Rome?"}],
    "tools": [{"name": "weather", "input_schema": {"type": "object", "properties": {}}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "Sunny."}


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM()) as server:
        yield server


def events_of(server: Running, **fields: Any) -> list[dict[str, Any]]:
    text = server.post("/v1/messages", **{**REQUEST, **fields}, stream=True).text
    events = []
    for entry in text.strip().split("\n\n"):
        name, data = entry.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def fold(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Assemble the content blocks of a stream as a client does; they start and stop in order."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(found)
            found.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(found) - 1
            for name, piece in event["delta"].items():
                key = "json" if name == "partial_json" else name
                if name != "type":
                    found[-1][key] += piece
    for block in found:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    return found


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: block[name] for name in block if name != "id"} for block in blocks]


@pytest.mark.parametrize(
    ("text", "kinds", "reason"),
    [
        ("Sunny.", ["text"], "end_turn"),
        (f"<think>Hm.</think>Let me see.{CALL}{CALL}", ["thinking", "text", "tool_use", "tool_use"],
         "tool_use"),
        (CALL, ["tool_use"], "tool_use"),
        ("<think>only", ["thinking"], "end_turn"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(2))
def test_streams_have_the_blocks_of_whole_answers(
    fake: Running, text: str, kinds: list[str], reason: str, seed: int
) -> None:
    fake.llm.text, fake.llm.seed = text, seed
    whole = fake.post("/v1/messages", **REQUEST).json()
    assert [block["type"] for block in whole["content"]] == kinds
    assert (whole["stop_reason"], whole["role"], whole["type"]) == (reason, "assistant", "message")
    events = events_of(fake)
    assert without_ids(fold(events)) == without_ids(whole["content"])
    names = [event["type"] for event in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": None}
    num_prompt = fake.post("/v1/messages/count_tokens", **without(REQUEST, "max_tokens")).json()
    assert events[0]["message"]["usage"]["input_tokens"] == num_prompt["input_tokens"]
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["output_tokens"] == len(text)


def test_an_answer_cut_by_the_size_of_the_pool() -> None:
    """The limit is not a stop sequence; OpenAI's APIs give the reason next to `finish_reason`."""
    with running(FakeLLM(reason="length", stop_reason="num_kvcache_blocks")) as server:
        message = server.post("/v1/messages", **REQUEST).json()
        chat = {"model": "tiny", "messages": REQUEST["messages"]}
        (choice,) = server.post("/v1/chat/completions", **chat).json()["choices"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    reasons = choice["finish_reason"], choice["stop_reason"]
    assert reasons == ("length", "num_kvcache_blocks")


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def test_calls_and_thoughts_come_back_into_the_prompt(fake: Running) -> None:
    fake.llm.text = f"<think>Hm.</think>{CALL}"
    said = fake.post("/v1/messages", **REQUEST).json()["content"]
    thought, call = said
    assert thought["thinking"] == "Hm."
    assert thought["signature"]
    result = [{"type": "text", "text": "sunny", "cache_control": {"type": "ephemeral"}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": said},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call["id"], "content": result},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."}]
    answer = fake.post("/v1/messages", **{**REQUEST, "messages": turns, "system": system})
    assert answer.status_code == 200, answer.text
    prompt = fake.llm.input_processor.tokenizer.decode(fake.llm.asked[-1][0])
    parts = (
        "Be brief.<|im_end|>",
        f"<think>Hm.</think>{CALL}<|im_end|>",
        "<|im_start|>tool\nsunny<|im_end|>",
        "And now?<|im_end|>",
    )
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)


def test_thinking_may_be_switched_off(fake: Running) -> None:
    fake.post("/v1/messages", **REQUEST, thinking={"type": "disabled"})
    prompt = fake.llm.input_processor.tokenizer.decode(fake.llm.asked[-1][0])
    assert prompt.endswith("<think>\n\n</think>\n\n")


def test_a_begun_answer_is_continued(fake: Running) -> None:
    begun = [*REQUEST["messages"], {"role": "assistant", "content": "It is "}]
    assert fake.post("/v1/messages", **{**REQUEST, "messages": begun}).status_code == 200
    prompt = fake.llm.input_processor.tokenizer.decode(fake.llm.asked[-1][0])
    assert prompt.endswith("<|im_start|>assistant\nIt is ")


def test_an_answer_may_be_held_to_a_schema(fake: Running) -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "max"}
    fields = without(REQUEST, "tools")
    assert fake.post("/v1/messages", **fields, output_config=config).status_code == 200
    constraint = fake.llm.asked[-1][1].structured_outputs
    assert constraint is not None
    assert constraint["json"] == schema
    for wrong in ({"format": {"type": "text"}}, {"effort": "some"}, {"task_budget": {}}):
        refused = fake.post("/v1/messages", **fields, output_config=wrong)
        assert refused.status_code == 400


def test_tools_may_have_marks_that_no_answer_depends_on(fake: Running) -> None:
    marks = {"eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}
    tools = [{**tool, **marks} for tool in REQUEST["tools"]]
    assert fake.post("/v1/messages", **{**REQUEST, "tools": tools}).status_code == 200


def test_long_prompts_are_named_as_clients_know_them(fake: Running) -> None:
    turns = [{"role": "user", "content": "x" * 2000}]
    message = fake.post("/v1/messages", **{**REQUEST, "messages": turns}).json()["error"]["message"]
    assert "prompt is too long" in message
    assert "this model's maximum context length is 1024 tokens" in message


def test_sampling_fields_reach_the_engine(fake: Running) -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["x"]}
    fake.post("/v1/messages", **REQUEST, **options)
    params = fake.llm.asked[-1][1]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert (params.stop, params.max_tokens) == (("x",), 100)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x"}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "assistant", "content": [RESULT]}]},
        {"system": [RESULT]},
        {"system": 5},
        {"tools": [{"name": "x"}]},
        {"tool_choice": {"type": "tool", "name": "other"}},
        {"temperature": 3},
        {"seed": 1},
        {"cache_salt": "x"},
    ],
    ids=ascii,
)
def test_errors_have_anthropics_form(fake: Running, wrong: dict[str, Any]) -> None:
    content = json.dumps({**REQUEST, **wrong})
    headers = {"content-type": "application/json"}
    response = fake.http.post("/v1/messages", content=content, headers=headers)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]


def test_a_turn_without_blocks_is_one_without_words(fake: Running) -> None:
    turns = [{"role": "user", "content": []}, *REQUEST["messages"]]
    response = fake.post("/v1/messages", **{**REQUEST, "messages": turns})
    assert response.status_code == 200, response.text
    prompt = fake.llm.input_processor.tokenizer.decode(fake.llm.asked[-1][0])
    assert "<|im_start|>user\n<|im_end|>\n<|im_start|>user\nWeather" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_clients_are_told_by_a_code_that_there_are_no_threads(fake: Running, stream: bool) -> None:
    thread = {"type": "create"}
    response = fake.post("/v1/messages", **REQUEST, thread=thread, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    with running(FakeLLM("Some text.", failure=EngineError("the core died"))) as server:
        events = events_of(server)
    assert events[0]["type"] == "message_start"
    error = {"type": "overloaded_error", "message": "the core died"}
    assert events[-1] == {"type": "error", "error": error}
