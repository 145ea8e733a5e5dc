"""Invalid requests get status 400 and an error body in the format of their API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.running import Running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
JSON = {"content-type": "application/json"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
UNIQUE = {"properties": {"x": {"type": "array", "uniqueItems": True}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": UNIQUE}}
NAMED = {"type": "function", "function": {"name": "g"}}
REGEX = {"regex": "x"}
SCHEMA = {"json_schema": {"schema": {"const": 1}}}
BAD_ID = {"$id": "http://[::1", "properties": {"x": {"$ref": "a.json#/b"}}}
# Each of these once overflowed the stack of the grammar compiler.
CHAINED_RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'
LINKS = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}
CHAINED = {"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": {**LINKS, "3000": {}}}
NESTED: Any = "x"
for _ in range(300):
    NESTED = [NESTED]


def said(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tool(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **fields}}


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["x", ""]}, "prompt"),
    ({"prompt": [[1], [-1]]}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [True, False]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [288]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": {"prompt": "x"}}, "prompt"),
    ({"prompt": "x", "model": 5}, "model"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "temperature": 2.1}, "temperature"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": 1e400}, "temperature"),
    ({"prompt": "x", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**18}, "prompt"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "min_tokens": 99, "max_tokens": 3}, "min_tokens"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 129}, "n"),
    ({"prompt": "x", "seed": 2**70}, "seed"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stop": [5]}, "stop"),
    ({"prompt": "x", "stop": ["x"] * 65}, "stop"),
    ({"prompt": "x", "stop": "x" * 257}, "stop"),
    ({"prompt": "x", "bad_words": ["x"] * 1025}, "bad_words"),
    ({"prompt": "x", "bad_words": ["x" * 65]}, "bad_words[0]"),
    ({"prompt": "x", "stop_token_ids": [5] * 1025}, "stop_token_ids"),
    ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5" * 5000: 1}}, "logit_bias"),
    ({"prompt": ["x"] * 2048, "n": 128}, "n"),
    ({"prompt": "x", "stop_token_ids": [288]}, "stop_token_ids"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"288": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "x", "bad_words": ["\ud800"]}, "bad_words[0]"),
    ({"prompt": "x", "cache_salt": "\udfff"}, "cache_salt"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": {}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"prompt": "x", "no_such_field": 0}, "no_such_field"),
    ({"prompt": "x", "logits_processors": ["os:system"]}, "logits_processors"),
    ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt": "x", "response_format": response_format(UNIQUE)}, "response_format"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (said(None), "messages"),
    (said(5), "messages"),
    (said([{"type": "image_url", "image_url": {"url": "data:"}}]), "messages"),
    (said([{"type": "text", "text": None}]), "messages"),
    (said(NESTED), "messages"),
    (said("\ud800"), "messages"),
    (said("x", no_such_field=1), "messages[0].no_such_field"),
    (said("x", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "messages"),
    (said("x", tool_calls=[{"function": {"name": "f", "arguments": "[]"}}]), "messages"),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({**CHAT, "tools": "x"}, "tools"),
    ({**CHAT, "tools": [{}]}, "tools[0]"),
    (
        {**CHAT, "tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
    ),
    ({**CHAT, "tool_choice": "required"}, "tool_choice"),
    ({**CHAT, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({**CHAT, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({**CHAT, "chat_template": "x"}, "chat_template"),
    ({**CHAT, "add_generation_prompt": True, "continue_final_message": True}, "messages"),
    ({**CHAT, "reasoning_effort": "extreme"}, "reasoning_effort"),
    ({**CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
    ({**CHAT, "functions": [{}]}, "functions"),
    (
        {**CHAT, "structured_outputs": {"json": {"type": "array", "uniqueItems": True}}},
        "structured_outputs",
    ),
    ({**CHAT, "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({**CHAT, "structured_outputs": {"xml": "x"}}, "structured_outputs"),
    ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({**CHAT, "response_format": {"type": "json_object", **SCHEMA}}, "response_format.json_schema"),
    ({**CHAT, "response_format": {"type": "text", **SCHEMA}}, "response_format.json_schema"),
    ({**CHAT, "response_format": response_format(UNIQUE)}, "response_format"),
    ({**CHAT, "response_format": response_format(BAD_ID)}, "response_format"),
    ({**CHAT, "response_format": response_format(CHAINED)}, "response_format"),
    ({**CHAT, "structured_outputs": {"json": CHAINED}}, "structured_outputs"),
    ({**CHAT, "structured_outputs": {"grammar": CHAINED_RULES}}, "structured_outputs"),
    ({**CHAT, "tools": [tool(BAD_ID, strict=True)]}, "tools"),
    (
        {**CHAT, "response_format": {"type": "text"}, "structured_outputs": {"regex": "x"}},
        "structured_outputs",
    ),
    ({**CHAT, "tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
    ({**CHAT, "tools": [TOOL], "tool_choice": "required", "structured_outputs": REGEX}, "tools"),
    ({**CHAT, "tools": [STRICT]}, "tools"),
]
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": ["x", []]}, "input"),
    ("/v1/embeddings", {"input": [1] * 1025}, "input"),
    ("/v1/embeddings", {"input": "x", "dimensions": 3}, "dimensions"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/rerank", {"query": "x"}, "documents"),
    ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "x", "documents": "x"}, "documents"),
    ("/v1/rerank", {"query": ["x"], "documents": ["x"]}, "query"),
    ("/rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
    ("/v2/rerank", {"query": "x", "documents": ["x", "\ud800"]}, "documents"),
    ("/v2/rerank", {"query": "x", "documents": ["x", "y" * 1025]}, "documents"),
    (
        "/v2/rerank",
        {"query": "x", "documents": ["x"], "max_tokens_per_doc": 9},
        "max_tokens_per_doc",
    ),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": CHAT["messages"]}, "prompt"),
    ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ("/detokenize", {"tokens": [288]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
]
CASES = [
    *(("/v1/completions", body, param) for body, param in COMPLETIONS),
    *(("/v1/chat/completions", body, param) for body, param in CHATS),
    *OTHERS,
]


def case_id(value: Any) -> str:
    return "nested" if "[[[[" in str(value) else ascii(value)[:70]


@pytest.mark.parametrize(("path", "body", "param"), CASES, ids=case_id)
def test_what_is_wrong_is_named(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.http.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "x", "temprature": 1}, "did you mean temperature?"),
        ("/v1/chat/completions", {**CHAT, "max_token": 3}, "did you mean max_tokens?"),
        ("/v1/chat/completions", said("x", nme="y"), "messages[0].nme is not supported; did you "),
        ("/v1/embeddings", {"input": "x", "xyzzy": 1}, "xyzzy is not supported"),
    ],
)
def test_unknown_fields_have_suggestions(
    server: Running, path: str, body: dict[str, Any], message: str
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"null", "application/json"),
        (b"[1]", "application/json"),
        (b'"prompt"', "application/json"),
        (b'{"prompt": "x\xff"}', "application/json"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json"),
        (b'{"prompt": "x", "seed": ' + b"9" * 6000 + b"}", "application/json"),
        (b"[" * 100_000, "application/json"),
        (
            b'{"messages": [{"role": "user", "content": ' + b"[" * 5000 + b"]" * 5000 + b"}]}",
            "application/json",
        ),
        (b'{"a":' * 100_000, "application/json"),
        (b"\x00\x01\x02", "application/octet-stream"),
        (b'{"prompt": "x"}', "text/plain"),
        (b"prompt=x", "application/x-www-form-urlencoded"),
        (b"--x\r\n\r\n", "multipart/form-data; boundary=x"),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_what_is_no_json_object_is_refused(
    server: Running, path: str, content: bytes, content_type: str
) -> None:
    response = server.http.post(path, content=content, headers={"content-type": content_type})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_older_names_of_structured_outputs_are_explained(server: Running, kind: str) -> None:
    response = server.post("/v1/chat/completions", **CHAT, **{f"guided_{kind}": "x"})
    assert response.status_code == 400
    assert "did you mean structured_outputs?" in response.json()["error"]["message"]


def test_unknown_paths_and_methods_have_bodies_too(server: Running) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        response = server.http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_fields_that_cannot_matter_are_accepted(server: Running) -> None:
    harmless = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "x",
        "safety_identifier": "x",
        "include": [],
        "cache_control": {"type": "ephemeral"},
        "user": "me",
        "suffix": None,
        "no_such_field": None,
        "best_of": 1,
    }
    response = server.post("/v1/completions", prompt="x\x00y", max_tokens=1, **harmless)
    assert response.status_code == 200, response.text


def test_a_request_that_allows_no_token_is_told_so(server: Running) -> None:
    """The error is detected when the token is sampled, which may be after a stream has started."""
    body = {"prompt": [1], "allowed_token_ids": [5], "logit_bias": {"5": -100}, "min_p": 1.0}
    server.post("/v1/completions", **body, bad_words=[bad_word(server, 5)])
    for stream in (False, True):
        response = server.post(
            "/v1/completions", **body, bad_words=[bad_word(server, 5)], stream=stream
        )
        assert response.status_code == 400, response.text
        assert "no token can be sampled" in response.json()["error"]["message"]


def bad_word(server: Running, token_id: int) -> str:
    return str(server.llm.input_processor.tokenizer.decode([token_id]))
