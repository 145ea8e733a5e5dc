"""Images, sounds and files are refused by the path that the client sent, in all chat APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running

TEXT = {"role": "user", "content": "x"}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM()) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (
            "/v1/chat/completions",
            {"messages": [TEXT, user({"type": "image_url", "image_url": {"url": "data:"}})]},
            "messages[1].content",
        ),
        (
            "/v1/responses",
            {"input": [TEXT, user({"type": "input_image", "image_url": "data:"})]},
            "input[1].content",
        ),
        (
            "/v1/messages",
            {"system": "x", "messages": [user({"type": "document", "source": {}})]},
            "messages[0].content",
        ),
    ],
    ids=["chat", "response", "message"],
)
def test_parts_that_are_not_text(
    fake: Running, path: str, fields: dict[str, Any], place: str
) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = fake.post(path, **{"model": "tiny", limit: 9, **fields})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"{place} has a part of type ")
    assert message.endswith("but this model reads text only")


def test_other_content_is_named_as_it_was_sent(fake: Running) -> None:
    messages = [TEXT, {"role": "user", "content": 5}]
    response = fake.post("/v1/chat/completions", model="tiny", messages=messages)
    assert response.json()["error"]["message"].startswith("messages[1].content must be a string")
