"""What Codex, Claude Code and OpenCode send: tools, history, and turns in any order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.serve.chat_turns import merge_turns
from nanovllm.serve.openai.response_tools import ResponseTool
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running

TEXT_ONLY = "left out: this model reads text only"
PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}
STRING = {"type": "object", "properties": {"task": {"type": "string"}}}
SPAWN = {"type": "function", "name": "spawn", "description": "Start.", "parameters": STRING}
NAMESPACE = {"type": "namespace", "name": "team", "description": "x", "tools": [SPAWN]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {}}
HOSTED = [
    {"type": "web_search", "external_web_access": True},
    {"type": "tool_search", "execution": "server"},
    {"type": "namespace", "name": "x"},
    {"type": "image_generation"},
]
READ = {"name": "Read", "input_schema": STRING}
FOUND = {"name": "Later", "input_schema": STRING, "defer_loading": True}
# Wants one leading system turn, then user and assistant turns in alternation.
STRICT = """\
{%- for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('system must be first') }}{% endif %}
{%- if not loop.first and m.role == messages[loop.index0 - 1].role and m.role != 'tool' %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM(max_len=4096)) as server:
        yield server


def prompt_of(fake: Running) -> str:
    return str(fake.llm.input_processor.tokenizer.decode(fake.llm.asked[-1][0]))


def respond(fake: Running, **body: Any) -> dict[str, Any]:
    response = fake.post("/v1/responses", **{"input": "x", **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize(
    ("tool", "called", "item"),
    [
        (NAMESPACE, call("team__spawn", task="x"),
         {"type": "function_call", "name": "spawn", "namespace": "team",
          "arguments": '{"task": "x"}'}),
        (PATCH, call("apply_patch", input="*** Begin\n"),
         {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin\n"}),
        (SEARCH, call("tool_search", query="x"),
         {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}}),
        (SPAWN, call("spawn", task="x"),
         {"type": "function_call", "name": "spawn", "arguments": '{"task": "x"}'}),
    ],
)  # fmt: skip
def test_calls_are_items_of_their_kind_of_tool(
    fake: Running, tool: dict[str, Any], called: str, item: dict[str, Any]
) -> None:
    fake.llm.text = called
    (found,) = respond(fake, tools=[tool, *HOSTED], tool_choice="auto")["output"]
    assert {name: found[name] for name in found if name not in ("id", "call_id")} == {
        **item,
        "status": "completed",
    }
    lines = fake.post("/v1/responses", input="x", tools=[tool], stream=True).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    (added,) = [each for each in events if each["type"] == "response.output_item.added"]
    (done,) = [each for each in events if each["type"] == "response.output_item.done"]
    assert added["item"]["type"] == done["item"]["type"] == item["type"]
    assert item.items() <= done["item"].items()
    if "input" in item:
        (whole,) = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
        assert (whole["input"], whole["item_id"]) == (item["input"], done["item"]["id"])


def test_items_of_all_kinds_come_back(fake: Running) -> None:
    """The model sees its own calls, and tools that were found are callable from then on."""
    found = {"type": "namespace", "name": "web", "tools": [{**SPAWN, "name": "get"}, {"type": 1}]}
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
        {"type": "function_call", "call_id": "1", "name": "spawn", "namespace": "team",
         "arguments": '{"task": "x"}', "id": "fc_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": [
            {"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": "data:"}]},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "a\nb"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
        {"type": "tool_search_call", "call_id": "3", "execution": "client", "status": "completed",
         "arguments": {"query": "web"}},
        {"type": "tool_search_output", "call_id": "3", "tools": [found]},
        {"type": "local_shell_call", "action": {}},
        {"type": "local_shell_call_output", "output": "x"},
        {"type": "compaction", "encrypted_content": "x"},
    ]  # fmt: skip
    fake.llm.text = call("web__get", task="x")
    answer = respond(fake, input=items, tools=[NAMESPACE, PATCH, SEARCH])
    (item,) = answer["output"]
    assert (item["name"], item["namespace"]) == ("get", "web")
    prompt = prompt_of(fake)
    schema = {"type": "function", "function": {"parameters": STRING, "name": "web__get"}}
    texts = [
        '{"name": "team__spawn", "arguments": {"task": "x"}}',
        f"<|im_start|>tool\nseen\n[image {TEXT_ONLY}]<|im_end|>",
        '{"name": "apply_patch", "arguments": {"input": "a\\nb"}}',
        "<|im_start|>tool\ndone<|im_end|>",
        '{"name": "tool_search", "arguments": {"query": "web"}}',
        "<|im_start|>tool\n{",
        f"[local_shell_call {TEXT_ONLY}]",
        f"[local_shell_call_output {TEXT_ONLY}]",
        f"[compaction {TEXT_ONLY}]",
    ]
    places = [prompt.index(text) for text in texts]
    assert places == sorted(places)
    (line,) = [each for each in prompt.splitlines() if "web__get" in each]
    written = json.loads(line.removesuffix("<|im_end|>"))["function"]
    assert (written["name"], written["parameters"]) == (
        schema["function"]["name"],
        schema["function"]["parameters"],
    )
    assert 'start: \\"x\\"' in prompt  # the grammar of the custom tool


def test_a_tool_of_a_namespace_may_be_chosen(fake: Running) -> None:
    for choice in (
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "spawn", "namespace": "team"},
    ):
        fake.llm.text = call("apply_patch", input="x")
        respond(fake, tools=[NAMESPACE, PATCH], tool_choice=choice)
        assert fake.llm.asked[-1][1].structured_outputs is not None


CLAUDE: dict[str, Any] = {
    "model": "claude-opus-5-5",
    "max_tokens": 128_000,
    "messages": [{"role": "user", "content": "x"}],
}


def ask(fake: Running, **body: Any) -> dict[str, Any]:
    response = fake.post("/v1/messages?beta=true", **{**CLAUDE, **body})
    assert response.status_code == 200, response.text
    counted = {**{name: CLAUDE[name] for name in ("model", "messages")}, **body}
    count = fake.post("/v1/messages/count_tokens?beta=true", **counted).json()["input_tokens"]
    found: dict[str, Any] = response.json()
    usage = found["usage"]
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[name] for name in parts) == count == len(fake.llm.asked[-1][0])
    assert usage["cache_read_input_tokens"] == 3  # of the fake engine
    return found


def test_system_turns_stand_anywhere(fake: Running) -> None:
    turns = [
        {"role": "user", "content": "A"},
        {"role": "system", "content": "B", "output_config": {"effort": "low"}},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        {"role": "system", "content": [{"type": "text", "text": "C", "cache_control": {}}]},
    ]
    ask(fake, messages=turns)
    texts = ("user\nA<", "system\nB<", "assistant\n<|im_end|>", "system\nC<")
    places = [prompt_of(fake).index(text) for text in texts]
    assert places == sorted(places)


@pytest.mark.parametrize("is_list", [False, True])
def test_the_billing_line_is_dropped(fake: Running, is_list: bool) -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.328.abc; cc_entrypoint=cli;"
    blocks = [{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}]
    ask(fake, system=blocks if is_list else f"{header}\nBe brief.")
    assert prompt_of(fake).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    ask(fake, system=blocks[:1])
    assert prompt_of(fake).startswith("<|im_start|>user")


def test_deferred_tools_are_written_where_they_are_found(fake: Running) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "is_error": False}
    reference = {"type": "tool_reference", "tool_name": "Later"}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "Read"}]},
        {"role": "user", "content": [{**result, "content": [reference]}]},
    ]
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    ask(fake, tools=[READ, hosted])
    before = prompt_of(fake)
    fake.llm.text = call("Later", task="x")
    answer = ask(fake, tools=[READ, FOUND, hosted], messages=turns)
    after = prompt_of(fake)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert answer["content"][0]["name"] == "Later"
    start = before.removesuffix("<|im_start|>assistant\n")
    assert "Later" not in before
    assert after.startswith(start)  # the found tool does not change the list of tools
    schema = {"type": "function", "function": {"name": "Later", "parameters": STRING}}
    assert f"<|im_start|>tool\n{json.dumps(schema)}<|im_end|>" in after
    ask(fake, tools=[READ], messages=turns)  # the tool no longer exists
    assert f"[tool_reference {TEXT_ONLY}]" in prompt_of(fake)


def test_usage_is_complete_at_the_end_of_a_stream(fake: Running) -> None:
    fake.llm.text = "Hello!"
    lines = fake.post("/v1/messages", **CLAUDE, stream=True).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    num_prompt = len(fake.llm.asked[-1][0])
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert [first[name] for name in names] == [num_prompt, 0, 0]
    assert [last[name] for name in names] == [num_prompt - 3, 3, 0]
    assert last["output_tokens"] == 6


def test_only_messages_have_claudes_names(fake: Running) -> None:
    chat = {"model": "claude-opus-5-5", "messages": CLAUDE["messages"]}
    assert fake.post("/v1/chat/completions", **chat).status_code == 404
    assert fake.post("/v1/messages", **{**CLAUDE, "model": "gpt"}).status_code == 404


IMAGE = {"type": "image", "source": {"type": "base64", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}
ASK = {"role": "user", "content": "x"}
USE = {"type": "tool_use", "id": "1", "name": "Read", "input": {}}
REFUSAL = {"type": "refusal", "refusal": "No."}
CALL = {"id": "1", "type": "function", "function": {"name": "Read", "arguments": "{}"}}
OUTPUT = {"type": "function_call_output", "call_id": "1"}
HISTORIES: list[tuple[str, str, list[Any]]] = [
    ("/v1/messages", "image", [{"role": "user", "content": [RESULT]}]),
    ("/v1/messages", "file", [{"role": "user", "content": [{"type": "document"}]}, ASK]),
    ("/v1/messages", "new", [{"role": "assistant", "content": [{"type": "new"}]}, ASK]),
    # Within a tool loop, where the last user turn is the one that began it.
    (
        "/v1/messages",
        "server_tool_use",
        [
            ASK,
            {"role": "assistant", "content": [{"type": "server_tool_use"}, USE]},
            {"role": "user", "content": [{**RESULT, "content": "x"}]},
        ],
    ),
    (
        "/v1/messages",
        "file",  # a file that a tool has read comes beside its result
        [
            ASK,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{**RESULT, "content": "x"}, {"type": "document"}]},
        ],
    ),
    (
        "/v1/chat/completions",
        "refusal",
        [
            ASK,
            {"role": "assistant", "content": [REFUSAL], "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
    ),
    ("/v1/chat/completions", "image", [ASK, {"role": "tool", "content": [PICTURE]}]),
    ("/v1/chat/completions", "audio", [{"role": "user", "content": [{"type": "audio"}]}, ASK]),
    ("/v1/responses", "image", [{"role": "user", "content": [{"type": "input_image"}]}, ASK]),
    ("/v1/responses", "item_reference", [{"type": "item_reference"}, ASK]),
    ("/v1/responses", "item_reference", [ASK, {"type": "item_reference"}]),  # within a tool loop
    ("/v1/responses", "file", [{"role": "assistant", "content": [{"type": "input_file"}]}, ASK]),
    ("/v1/responses", "new", [{"type": "reasoning", "content": [{"type": "new"}]}, ASK]),
]


@pytest.mark.parametrize(("path", "name", "turns"), HISTORIES, ids=str)
def test_pictures_in_the_history_become_text(
    fake: Running, path: str, name: str, turns: list[Any]
) -> None:
    key = "input" if path == "/v1/responses" else "messages"
    limits = {"max_tokens": 9} if path == "/v1/messages" else {}
    response = fake.post(path, **{key: turns}, **limits)
    assert response.status_code == 200, response.text
    assert f"[{name} {TEXT_ONLY}]" in prompt_of(fake)


@pytest.mark.parametrize(
    "item",
    [
        {**OUTPUT, "output": None},
        {**OUTPUT, "output": {"exit_code": 0}},
        {"role": "assistant", "content": None},
        {"type": "reasoning", "content": [{"type": "text", "text": "thought"}]},
    ],
    ids=str,
)
def test_odd_items_do_not_end_the_conversation(fake: Running, item: dict[str, Any]) -> None:
    respond(fake, input=[ASK, item, ASK])
    prompt = prompt_of(fake)
    assert ("exit_code" in prompt) == (item.get("output") is not None)
    assert "left out" not in prompt


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"system": "x", "messages": [{"role": "user", "content": [{"text": 5}]}]}, "messages[0]"),
        ({"system": [{"type": "text", "text": 5}], "messages": [ASK]}, "system"),
    ],
    ids=["turn", "system"],
)
def test_errors_name_what_the_client_sent(fake: Running, body: dict[str, Any], name: str) -> None:
    response = fake.post("/v1/messages", max_tokens=9, **body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{name}")


@pytest.mark.parametrize("arguments", ['{"task": "x', "[1]", "null"])
def test_a_call_without_an_object_does_not_end_the_conversation(
    fake: Running, arguments: str
) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "spawn", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "1", "output": "failed"}
    respond(fake, input=[ASK, call, result])
    assert f'"arguments": {{"incomplete": {json.dumps(arguments)}}}' in prompt_of(fake)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/messages", [IMAGE]),
        ("/v1/chat/completions", [{"type": "text", "text": "See"}, PICTURE]),
        ("/v1/responses", [{"type": "input_image"}]),
    ],
)
def test_a_picture_in_the_last_turn_is_refused(
    fake: Running, path: str, content: list[Any]
) -> None:
    key = "input" if path == "/v1/responses" else "messages"
    limits = {"max_tokens": 9} if path == "/v1/messages" else {}
    response = fake.post(path, **{key: [{"role": "user", "content": content}]}, **limits)
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("but this model reads text only")


def turns_of(text: str) -> list[dict[str, Any]]:
    """Return turns from their initials: s, d, u, a, t; each one's content is its number."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[each], "content": str(i)} for i, each in enumerate(text)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sdu", [("system", "0\n\n1"), ("user", "2")]),
        ("dduu", [("system", "0\n\n1"), ("user", "2\n\n3")]),
        ("suasu", [("system", "0"), ("user", "1\n\n3"), ("assistant", "2"), ("user", "4")]),
        ("uus", [("user", "0\n\n1\n\n2")]),
        ("uatts", [("user", "0"), ("assistant", "1"), ("tool", "2"), ("tool", "3\n\n4")]),
        ("as", [("assistant", "0"), ("user", "1")]),
        ("uaau", [("user", "0"), ("assistant", "1\n\n2"), ("user", "3")]),
    ],
)
def test_turns_are_merged(before: str, after: list[tuple[str, str]]) -> None:
    turns = turns_of(before)
    assert [(each["role"], each["content"]) for each in merge_turns(turns)] == after
    assert turns == turns_of(before)


def test_calls_and_reasoning_of_merged_turns_are_kept() -> None:
    first = {"role": "assistant", "content": "", "reasoning": "A", "tool_calls": [1]}
    second = {"role": "assistant", "content": "x", "reasoning": "B", "tool_calls": [2]}
    (merged,) = merge_turns([first, second])
    whole = {"content": "x", "reasoning": "A\n\nB", "tool_calls": [1, 2]}
    assert merged == {"role": "assistant", **whole}


def test_images_of_merged_turns_are_kept() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    first, second = {"role": "user", "content": [image]}, {"role": "user", "content": "x"}
    (merged,) = merge_turns([first, second])
    texts = [{"type": "text", "text": text} for text in ("\n\n", "x")]
    assert merged == {"role": "user", "content": [image, *texts]}


def test_a_strict_template_gets_merged_turns() -> None:
    with running(FakeLLM(), chat_template=STRICT) as server:
        ask(server, system="S", messages=[*CLAUDE["messages"], {"role": "system", "content": "T"}])
        assert prompt_of(server) == (
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nx\n\nT<|im_end|>\n"
        )
        ask(server, messages=CLAUDE["messages"])
        assert prompt_of(server) == "<|im_start|>user\nx<|im_end|>\n"
    raises = "{{ raise_exception('never') }}"
    with running(FakeLLM(), chat_template=raises) as server:
        response = server.post("/v1/messages", **CLAUDE)
        assert response.status_code == 400
        assert "never" in response.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ["[1]", "5", "null", "{"])
def test_arguments_that_are_no_object_are_passed_on(arguments: str) -> None:
    custom, search = (ResponseTool(kind, "x", None, {}) for kind in ("custom", "tool_search"))
    assert custom.finish(arguments) == {"input": arguments}
    assert search.finish(arguments) == {"arguments": {}}
