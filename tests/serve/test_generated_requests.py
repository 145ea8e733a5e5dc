"""Random valid and invalid requests, and clients that disconnect: nothing breaks."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.serve.running import Running

pytestmark = [pytest.mark.endurance, pytest.mark.slow]

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": "So.", "reasoning": "Hm."},
    {"role": "user", "content": "And?"},
]
AGENT_TOOLS = [
    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    {"type": "custom", "name": "c", "format": {"syntax": "lark", "definition": "x"}},
    {"type": "tool_search", "execution": "client"},
    {"type": "web_search"},
]
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
FOUND = [{"type": "tool_reference", "tool_name": "f"}, {"type": "image"}]
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": FOUND}
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "seed": 3,
    "stop": ["xyz"],
    "n": 2,
    "logit_bias": {"5": 1.5},
    "min_tokens": 1,
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2, 3],
    "repetition_penalty": 1.1,
    "stream": True,
    "cache_salt": "s",
    "priority": 1,
    "truncate_prompt_tokens": 9,
    "return_token_ids": True,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        **SAMPLING,
        "prompt": "x",
        "max_tokens": 3,
        "echo": True,
        "logprobs": 2,
        "structured_outputs": {"choice": ["a", "b"]},
    },
    "/v1/chat/completions": {
        **SAMPLING,
        "messages": MESSAGES,
        "max_tokens": 3,
        "tools": [TOOL],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "instructions": "x",
        "max_output_tokens": 3,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "stream": True,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
    },
    "/v1/responses?agent": {
        "input": [
            {"role": "user", "content": [{"type": "input_image"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]},
            {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": "x"},
            {"type": "tool_search_call", "call_id": "3", "arguments": {}},
            {"type": "tool_search_output", "call_id": "3", "tools": [AGENT_TOOLS[0]]},
            {"role": "user", "content": "x"},
        ],
        "tools": AGENT_TOOLS,
        "tool_choice": "auto",
        "max_output_tokens": 3,
        "client_metadata": {},
    },
    "/v1/messages?beta=true": {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "system", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, USE]},
            {"role": "user", "content": [RESULT, {"type": "text", "text": "x"}]},
        ],
        "system": [{"type": "text", "text": "x-anthropic-billing-header: x"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}],
        "max_tokens": 3,
        "context_management": {},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "system": "x",
        "max_tokens": 3,
        "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 5},
    },
    "/v1/embeddings": {"input": ["x", "y"], "encoding_format": "base64"},
    "/v1/rerank": {"query": "x", "documents": ["x", {"text": "y"}], "top_n": 1},
    "/tokenize": {"prompt": "x", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
# fmt: off
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2.5, 10**30, -(2**63), 1e308, "", "x", "\x00", "\ud800", "é" * 50,
    [], {}, [None], [[]], [[[[[]]]]], {"type": "text"}, {"type": "function"}, [1, "x"], ["x", 1],
    {"x": {"x": {"x": []}}}, [0] * 2000, "auto", "none", [{}], {"": ""},
]
# fmt: on


def mutate(chance: random.Random, value: Any, depth: int = 0) -> Any:
    """Change a random part of a value."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        changed = dict(value)
        key = chance.choice(list(changed))
        action = chance.random()
        if action < 0.15:
            del changed[key]
        elif action < 0.2:
            changed[f"{key}x"] = changed[key]
        else:
            changed[key] = mutate(chance, changed[key], depth + 1)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        return [*value[:place], mutate(chance, value[place], depth + 1), *value[place + 1 :]]
    return chance.choice(ODD)


def make_request(chance: random.Random) -> tuple[str, bytes]:
    path = chance.choice(list(BODIES))
    whole = BODIES[path]
    required = {"prompt", "messages", "input", "tokens", "max_tokens", "max_output_tokens"}
    required |= {"query", "documents"}
    body: Any = {
        name: value for name, value in whole.items() if name in required or chance.random() < 0.3
    }
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        body = mutate(chance, body)
    content = json.dumps(body).encode()
    if chance.random() < 0.05:
        content = content[: chance.randrange(len(content) + 1)]
    return path, content


def make_odd_request(chance: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Return a request that is usually rejected before its fields are validated."""
    path, content = make_request(chance)
    headers = {"content-type": "application/json"}
    kind = chance.randrange(8)
    if kind == 0:
        wrong = ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "", "x/")
        headers["content-type"] = chance.choice((*wrong, "application/json; charset=utf-16"))
    elif kind == 1:  # random bytes, usually not UTF-8
        place = chance.randrange(len(content) + 1)
        content = content[:place] + bytes(chance.choices(range(256), k=3)) + content[place:]
    elif kind == 2:
        depth = chance.choice((50, 900, 100_000))
        content = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
    elif kind == 3:
        number = chance.choice(("9" * 5000, "1e999999", "-0", "NaN", "Infinity", "0x10", "1e-999"))
        name = chance.choice(("max_tokens", "temperature", "seed", "n", "prompt", "top_k"))
        content = f'{{"prompt": "x", "messages": [], "{name}": {number}}}'.encode()
    elif kind == 4:
        odd = (b"\\u0000", b"\x00", b"\\ud800", b"\\uffff")
        content = content.replace(b"x", chance.choice(odd))
    elif kind == 5:
        headers |= {f"x-{i}": "x" * 500 for i in range(chance.choice((1, 20)))}
        headers["x-request-id"] = "x" * chance.randrange(300)
    elif kind == 6:
        content = chance.choice((b"", b"null", b"[]", b"0", b'"x"', b"\xef\xbb\xbf{}", b"{}" * 9))
    else:
        path += chance.choice(("/", "/x", "?x=%00", "%2f", "//", "/%ff", "/../x", ""))
    return path, content, headers


def everything_is_back(server: Running, num_free_blocks: int) -> bool:
    stats = server.llm.stats
    counts = (server.llm.num_requests, stats.num_running, stats.num_waiting, server.num_tasks - 1)
    return counts == (0, 0, 0, 0) and stats.num_free_blocks >= num_free_blocks


def settle(server: Running, num_free_blocks: int) -> None:
    """Wait until nothing is left of any request except the server's own task."""
    end = time.monotonic() + 60
    while not everything_is_back(server, num_free_blocks):
        assert time.monotonic() < end, (
            server.llm.num_requests,
            server.num_tasks,
            server.llm.stats,
        )
        time.sleep(0.05)


def test_no_request_breaks_the_server(server: Running, count: Callable[..., int]) -> None:
    num_free = server.llm.stats.num_free_blocks
    found: dict[int, int] = {}

    async def ask_all() -> None:
        limit = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:

            async def ask(number: int) -> None:
                chance = random.Random(number)
                path, content, headers = make_odd_request(chance)
                if number % 2:
                    path, content = make_request(chance)
                    headers = {"content-type": "application/json"}
                async with limit:
                    response = await client.post(path, content=content, headers=headers)
                assert response.status_code < 500, (path, content[:2000], response.text)
                found[response.status_code] = found.get(response.status_code, 0) + 1
                if response.status_code >= 400:
                    assert response.json()["error"]["message"], (path, content[:2000])

            await asyncio.gather(*(ask(number) for number in range(count(10_000, few=400))))

    asyncio.run(ask_all())
    print("statuses:", found)
    assert found[200] > 0.1 * sum(found.values())
    assert found[400] > 0.1 * sum(found.values())
    settle(server, num_free)


def test_clients_that_hang_up_leave_nothing(server: Running, count: Callable[[int], int]) -> None:
    num_free = server.llm.stats.num_free_blocks

    async def come_and_go(number: int, client: httpx.AsyncClient) -> None:
        chance = random.Random(number)
        body = {"prompt": [number % 200] * chance.randint(1, 200), "max_tokens": 200}
        body |= {"n": chance.randint(1, 3), "ignore_eos": True, "stream": chance.random() < 0.5}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.sleep(chance.random() * 0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
            for start in range(0, count(1000), 20):
                await asyncio.gather(
                    *(come_and_go(number, client) for number in range(start, start + 20))
                )

    asyncio.run(all_of_them())
    settle(server, num_free)
    assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
