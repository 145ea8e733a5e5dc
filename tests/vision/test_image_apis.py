"""Images in the HTTP APIs: the answers are transformers', and wrong images get a 400."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL")

from PIL import Image

from nanovllm import AsyncLLM
from nanovllm.serve import fetch_images
from nanovllm.serve.live.engine_events import decode_shown
from tests.serve.running import Running, running
from tests.vision.tiny_vision import (
    IMAGE,
    Prompt,
    TinyVision,
    noise,
    processor,
    tiny_vision,
    with_chat,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SQUARE, OTHER, WIDE = noise(1, 32, 32), noise(2, 32, 32), noise(3, 60, 20)
SIZES: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "dtype": "float32",
    "device": "cpu",
}
NUM = 8


@pytest.fixture(scope="module")
def checkpoint(checkpoint_root: Path) -> TinyVision:
    return tiny_vision(checkpoint_root, "dense")


@pytest.fixture(scope="module")
def server(checkpoint: TinyVision, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = with_chat(checkpoint.path, tmp_path_factory.mktemp("apis") / "model")
    llm = AsyncLLM(folder, in_process=True, **SIZES)
    with running(llm, allowed_media_domains=("images.test",)) as server:
        yield server


def png(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url(image: Image.Image) -> str:
    return f"data:image/png;base64,{png(image)}"


def chat_image(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image), "detail": "high"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


class Expected:
    """What transformers generates from a rendered conversation, and its number of tokens."""

    def __init__(self, server: Running, checkpoint: TinyVision, *pieces: Any) -> None:
        tokenizer = server.llm.input_processor.tokenizer
        prompt: Prompt = []
        for piece in pieces:
            is_text = isinstance(piece, str)
            prompt += tokenizer.encode(piece, add_special_tokens=False) if is_text else [piece]
        self.text = tokenizer.decode(checkpoint.generate(prompt, NUM), skip_special_tokens=True)
        images = [piece for piece in prompt if isinstance(piece, Image.Image)]
        counts = [processor()(images=[image]).image_grid_thw[0].prod() // 4 for image in images]
        self.num_tokens = len(prompt) + sum(counts) + len(images)  # and a token on each side


def chat(server: Running, messages: list[Any], **fields: Any) -> httpx.Response:
    given = {"model": "tiny", "max_tokens": NUM, "temperature": 0, **fields}
    return server.post("/v1/chat/completions", messages=messages, ignore_eos=True, **given)


def test_chat_completions(server: Running, checkpoint: TinyVision) -> None:
    content = [text("a"), chat_image(SQUARE), text("b"), chat_image(WIDE)]
    want = Expected(server, checkpoint, "<user>a", SQUARE, "b", WIDE, "<assistant>")
    messages = [{"role": "user", "content": content}]
    body = chat(server, messages).json()
    assert body["choices"][0]["message"]["content"] == want.text
    assert body["usage"]["prompt_tokens"] == want.num_tokens
    tokenized = server.post("/tokenize", messages=messages).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == want.num_tokens
    fields = {"return_token_ids": True, "prompt_logprobs": 0, "logprobs": True}
    again = chat(server, messages, **fields).json()
    assert again["prompt_token_ids"] == tokenized["tokens"]
    assert len(again["prompt_logprobs"]) == want.num_tokens
    client = server.openai.chat.completions.create(
        model="tiny", messages=messages, max_tokens=NUM, temperature=0, stream=True,  # type: ignore
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert "".join(piece.choices[0].delta.content or "" for piece in client) == want.text


def test_images_of_earlier_turns(server: Running, checkpoint: TinyVision) -> None:
    """They stay in the prompt, and their prefix is cached."""
    messages: list[Any] = [{"role": "user", "content": [chat_image(SQUARE), text("what?")]}]
    first = chat(server, messages).json()["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    pieces = "<user>", SQUARE, f"what?<assistant>{first}<user>more<assistant>"
    want = Expected(server, checkpoint, *pieces)
    body = chat(server, messages).json()
    assert body["choices"][0]["message"]["content"] == want.text
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_responses(server: Running, checkpoint: TinyVision) -> None:
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": url(OTHER), "detail": "auto"},
    ]
    request = {"input": [{"role": "user", "content": parts}], "temperature": 0}
    body = server.post("/v1/responses", model="tiny", max_output_tokens=NUM, **request).json()
    want = Expected(server, checkpoint, "<user>see", OTHER, "<assistant>")
    said = body["output"][0]["content"][0]["text"]
    assert want.text.startswith(said)  # this API has no ignore_eos
    assert body["usage"]["input_tokens"] == want.num_tokens
    result = [
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": [parts[1]]},
    ]
    items = [{"role": "user", "content": "go"}, *result]
    body = server.post("/v1/responses", model="tiny", max_output_tokens=NUM, input=items).json()
    want = Expected(server, checkpoint, "<user>go<assistant><tool>", OTHER, "<assistant>")
    assert body["usage"]["input_tokens"] == want.num_tokens


def block(image: Image.Image) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": png(image)}
    return {"type": "image", "source": source}


def message(server: Running, messages: list[Any]) -> dict[str, Any]:
    request = {"model": "tiny", "max_tokens": NUM, "temperature": 0, "messages": messages}
    body: dict[str, Any] = server.post("/v1/messages", **request).json()
    counted = {"model": "tiny", "messages": messages}
    count = server.post("/v1/messages/count_tokens", **counted).json()["input_tokens"]
    usage = body["usage"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]
    return body | {"num_tokens": count}


def test_anthropic_messages(server: Running, checkpoint: TinyVision) -> None:
    """Images of users, in tool results, and beside tool results."""
    body = message(server, [{"role": "user", "content": [block(SQUARE), text("x")]}])
    want = Expected(server, checkpoint, "<user>", SQUARE, "x<assistant>")
    assert want.text.startswith(body["content"][0]["text"])
    assert body["num_tokens"] == want.num_tokens
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("r"), block(OTHER)]}
    turns = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, block(SQUARE)]},
    ]
    body = message(server, turns)
    pieces = "<user>go<assistant><tool>r", OTHER, SQUARE, "<assistant>"
    assert body["num_tokens"] == Expected(server, checkpoint, *pieces).num_tokens


def test_the_anthropic_client(server: Running, checkpoint: TinyVision) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="a key", max_retries=0)
    turns = [{"role": "user", "content": [block(SQUARE), text("y")]}]
    given = client.messages.create(model="tiny", max_tokens=NUM, temperature=0, messages=turns)
    want = Expected(server, checkpoint, "<user>", SQUARE, "y<assistant>")
    assert want.text.startswith(given.content[0].text)


def test_four_at_once_and_one_after_another(server: Running, checkpoint: TinyVision) -> None:
    images = [SQUARE, OTHER, SQUARE, OTHER]
    want = [Expected(server, checkpoint, "<user>is", x, "?<assistant>").text for x in images]

    def ask(image: Image.Image) -> str:
        content = [text("is"), chat_image(image), text("?")]
        body = chat(server, [{"role": "user", "content": content}]).json()
        answer: str = body["choices"][0]["message"]["content"]
        return answer

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, images)) == want
    assert list(map(ask, images)) == want


REFUSED = {
    "http": ("http://127.0.0.1/x.png", "--allowed-media-domains"),
    "https": ("https://example.com/x.png", "--allowed-media-domains"),
    "user": ("http://images.test@127.0.0.1/x.png", "--allowed-media-domains"),
    "metadata": ("http://169.254.169.254/latest", "--allowed-media-domains"),
    "file": ("file:///etc/passwd", "a data URL"),
    "svg": ("data:image/svg+xml;base64,PHN2Zz4=", "one of PNG"),
    "truncated": (url(SQUARE)[:-400] + "AAAA", "cannot be read"),
    "base64": ("data:image/png;base64,%%%", "not valid base64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_images_get_a_400(server: Running, name: str) -> None:
    address, reason = REFUSED[name]
    content = [text("a"), {"type": "image_url", "image_url": {"url": address}}]
    start = time.perf_counter()
    response = chat(server, [{"role": "user", "content": content}])
    assert time.perf_counter() - start < 30
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert reason in error["message"]
    assert error["message"].startswith("messages[0].content[1]: ")
    assert error["param"] == "messages"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions"])
def test_other_paths_read_text_only(server: Running, path: str) -> None:
    name = "input" if path == "/v1/embeddings" else "prompt"
    response = server.post(path, model="tiny", **{name: [chat_image(SQUARE)]})
    assert response.status_code in (400, 422)


def test_images_of_unknown_forms(server: Running) -> None:
    part = {"type": "input_image", "file_id": "1"}
    response = server.post(
        "/v1/responses", model="tiny", input=[{"role": "user", "content": [part]}]
    )
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("input[0].content has a part of type 'input_image', but images are")
    system = [{"role": "system", "content": [chat_image(SQUARE)]}, {"role": "user", "content": "x"}]
    assert "messages[0].content has a part" in chat(server, system).json()["error"]["message"]


def test_the_page_shows_the_models_placeholder(server: Running) -> None:
    """Snapshots have the engine's ids, which no tokenizer decodes."""
    tokenizer = server.llm.input_processor.get_tokenizer()
    assert decode_shown(tokenizer.decode, IMAGE, [-2, -2, 40]).startswith("<|image_pad|>" * 2)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_images_of_the_history_become_texts(server: Running, name: str) -> None:
    """They must not end the conversation."""
    wrong = {"type": "image_url", "image_url": {"url": REFUSED[name][0]}}
    left_out = "[image left out: it cannot be read]"

    def count(part: Any, result: Any) -> int:
        turns = [
            {"role": "user", "content": [text("a"), part, chat_image(SQUARE)]},
            {"role": "assistant", "content": "b<|image_pad|>"},
            {"role": "user", "content": [chat_image(WIDE)]},
            {"role": "tool", "tool_call_id": "1", "content": [result]},
        ]
        response = server.post("/tokenize", messages=turns)
        assert response.status_code == 200, response.text
        return int(response.json()["count"])

    assert count(wrong, wrong) == count(text(left_out), text(left_out))


def test_the_oldest_images_of_the_history_are_left_out(server: Running) -> None:
    old = [chat_image(noise(i, 16, 16)) for i in range(15)]

    def count(parts: list[Any]) -> int:
        turns = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": [chat_image(SQUARE), chat_image(WIDE)]},
        ]
        body = server.post("/tokenize", messages=turns).json()
        return int(body["count"])

    assert count(old) == count([text("[image left out: only 16 fit]"), *old[1:]])


def test_placeholders_in_texts(server: Running, checkpoint: TinyVision) -> None:
    content = [text("<|image_pad|>"), chat_image(SQUARE)]
    body = chat(server, [{"role": "user", "content": content}]).json()
    want = Expected(server, checkpoint, "<user>< |image_pad|>", SQUARE, "<assistant>")
    assert body["choices"][0]["message"]["content"] == want.text


def test_too_many_images(server: Running) -> None:
    content = [text("a"), *[chat_image(noise(i, 8, 8)) for i in range(17)]]
    response = chat(server, [{"role": "user", "content": content}])
    assert response.status_code == 400
    assert "at most 16 (limit_mm_per_prompt), got 17" in response.json()["error"]["message"]


def test_prompts_that_are_too_long(server: Running) -> None:
    """With images alone, or with the text: clients look for these words, and shorten them."""
    for words, count in (("a", 11), ("a" * 240, 1)):
        content = [text(words), *[chat_image(noise(i, 48, 32)) for i in range(count)]]
        error = chat(server, [{"role": "user", "content": content}]).json()["error"]
        assert error["message"].startswith("the prompt is too long: this model's maximum context")
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"


def test_truncated_prompts(server: Running) -> None:
    content = [text("a"), chat_image(SQUARE)]
    response = chat(server, [{"role": "user", "content": content}], truncate_prompt_tokens=5)
    assert response.status_code == 400
    assert "truncate_prompt_tokens must be omitted with images" in response.text


def test_large_bodies_get_a_413(server: Running) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2**25}}]
    assert chat(server, [{"role": "user", "content": content}]).status_code == 413


def fetched(server: Running, address: str) -> httpx.Response:
    content = [text("a"), {"type": "image_url", "image_url": {"url": address}}]
    return chat(server, [{"role": "user", "content": content}])


def test_allowed_hosts_with_private_addresses(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is allowed may still resolve to an address in this network."""
    local = ("127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "0.0.0.0")
    local += ("::1", "::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "fec0::1")
    for address in local:

        async def addresses_of(_: httpx.URL, found: str = address) -> list[str]:
            return ["93.184.216.34", found]

        monkeypatch.setattr(fetch_images, "addresses_of", addresses_of)
        response = fetched(server, "http://images.test/x.png")
        assert response.status_code == 400, address
        assert "on a host with public addresses only" in response.text


def test_allowed_hosts(
    server: Running, checkpoint: TinyVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redirects are not followed, and files are limited in size."""
    file = base64.b64decode(png(SQUARE))

    def respond(request: httpx.Request) -> httpx.Response:
        assert request.url.host == "93.184.216.34"
        assert request.headers["host"] == "images.test"
        if request.url.path == "/redirect":
            return httpx.Response(302, headers={"Location": "http://127.0.0.1/x.png"})
        kind = "text/html" if request.url.path == "/page" else "image/png"
        data = b"x" * (21 << 20) if request.url.path == "/large" else file
        return httpx.Response(200, headers={"Content-Type": kind}, stream=httpx.ByteStream(data))

    async def addresses_of(_: httpx.URL) -> list[str]:
        return ["93.184.216.34"]

    def client(**_: Any) -> httpx.AsyncClient:
        return AsyncClient(transport=httpx.MockTransport(respond))

    AsyncClient = httpx.AsyncClient
    monkeypatch.setattr(fetch_images, "addresses_of", addresses_of)
    monkeypatch.setattr(fetch_images.httpx, "AsyncClient", client)
    body = fetched(server, "https://images.test/x.png").json()
    want = Expected(server, checkpoint, "<user>a", SQUARE, "<assistant>")
    assert body["choices"][0]["message"]["content"] == want.text
    many = [{"type": "image_url", "image_url": {"url": "https://images.test/x.png"}}] * 17
    response = chat(server, [{"role": "user", "content": many}])
    assert "at most 16 (limit_mm_per_prompt), got 17" in response.json()["error"]["message"]
    reasons = {"redirect": "got 302", "page": "one of PNG", "large": "at most 20 MiB"}
    for name, reason in reasons.items():
        response = fetched(server, f"https://images.test/{name}")
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]
