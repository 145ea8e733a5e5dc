"""Rerankers and embedding models behind the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm import AsyncLLM
from tests.byte_tokenizer import with_tokenizer
from tests.serve.running import Running, running
from tests.test_embedding_models import MEAN, add_modules, mean, wanted
from tests.test_rerank import DOCUMENTS, QUERY, Reranker, make_reranker

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 512,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 128,
    "max_num_seqs": 8,
    "in_process": True,
}


@pytest.fixture(scope="module")
def reranker(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Reranker:
    return make_reranker(tiny("qwen3"), tmp_path_factory.mktemp("reranker") / "model")


@pytest.fixture(scope="module")
def llm(reranker: Reranker) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(reranker.path, **OPTIONS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Running]:
    with running(llm) as server:
        yield server


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(server: Running, reranker: Reranker, path: str) -> None:
    documents = [{"text": text} if index % 2 else text for index, text in enumerate(DOCUMENTS)]
    scores = reranker.scores()
    answer = server.post(path, model="tiny", query=QUERY, documents=documents, top_n=4).json()
    assert answer.keys() == {"id", "model", "usage", "results"}
    assert answer["model"] == "tiny"
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:4]
    assert [result["index"] for result in answer["results"]] == order
    for result in answer["results"]:
        assert result.keys() == {"index", "document", "relevance_score"}
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-4)
    lengths = [len(reranker.prompt_ids(document)) for document in DOCUMENTS]
    assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}


def test_options_of_rerank(server: Running, reranker: Reranker) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 0, "return_documents": False}
    results = server.post("/v1/rerank", **body).json()["results"]
    assert len(results) == len(DOCUMENTS)
    assert all(result.keys() == {"index", "relevance_score"} for result in results)
    body |= {"documents": DOCUMENTS[:1], "instruction": "Judge."}
    [result] = server.post("/v1/rerank", **body).json()["results"]
    right = reranker.relevance(DOCUMENTS[0], "Judge.")
    assert result["relevance_score"] == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/rerank", {"query": QUERY, "documents": []}), ("/v1/embeddings", {"input": []})],
)
def test_errors_name_the_long_text(server: Running, path: str, body: dict[str, Any]) -> None:
    [name] = [key for key, value in body.items() if value == []]
    response = server.post(path, **{**body, name: ["short", "x" * 520]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"{name}[1]: ")


def test_nothing_is_tokenized_on_the_event_loop(
    server: Running, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer's lock may be held for long."""
    encode, threads = llm.input_processor.encode, []

    def watched(*args: Any, **options: Any) -> Any:
        threads.append(asyncio._get_running_loop())
        return encode(*args, **options)

    monkeypatch.setattr(llm.input_processor, "encode", watched)
    assert server.post("/v1/rerank", query=QUERY, documents=["x"]).status_code == 200
    assert threads
    assert set(threads) == {None}


def test_a_tokenizer_without_labels_is_an_error(tiny: Any, tmp_path: Any) -> None:
    """The same server embeds with the checkpoint's pooling, and refuses to generate."""
    folder = with_tokenizer(tiny("qwen3").path, tmp_path / "model")
    add_modules(folder, MEAN, "", "1_Pooling", "4_Normalize")
    llm = AsyncLLM(folder, **OPTIONS)
    try:
        with running(llm) as server:
            ids = llm.input_processor.encode("a cat")
            [item] = server.openai.embeddings.create(model="tiny", input="a cat").data
            vector = wanted(folder, ids, mean)
            assert item.embedding == pytest.approx(vector / (vector @ vector) ** 0.5, abs=1e-5)
            refused = [
                server.post("/v1/rerank", query="x", documents=["y"]),
                server.post("/v1/completions", prompt="x"),
                server.post("/v1/completions", prompt="x", stream=True),
            ]
    finally:
        llm.close()
    for response, message in zip(refused, ["has no tokens", *["embedding model"] * 2], strict=True):
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
