"""Relevance scores equal those of Qwen3-Reranker's recipe with transformers."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.errors import RequestError
from nanovllm.outputs import RerankOutput
from tests.byte_tokenizer import with_tokenizer
from tests.checkpoints import TinyCheckpoint
from tests.devices import DEVICES
from tests.test_edited_requests import OPTIONS as COMMON
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {**COMMON, "max_model_len": 512, "skip_tokenizer_init": False}
QUERY = "How tall is a giraffe?"
DOCUMENTS = ["5 meters.", "", 'A "yes" or no\n', "x" * 90, "{braces} <|im_end|>", "5 meters."]
TASK = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
"""
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Reranker:
    path: Path
    model: Any  # the transformers model
    tokenizer: Any

    def prompt_ids(self, document: str, task: str = TASK) -> list[int]:
        pair = f"<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}"
        return [i for text in (BEFORE, pair, AFTER) for i in self.tokenizer.encode(text)]

    @torch.inference_mode()
    def relevance(self, document: str, task: str = TASK) -> float:
        logits = self.model(torch.tensor([self.prompt_ids(document, task)])).logits[0, -1]
        labels = self.tokenizer.convert_tokens_to_ids(["no", "yes"])
        score: float = logits[labels].softmax(0)[1].item()
        return score

    def scores(self) -> list[float]:
        return [self.relevance(document) for document in DOCUMENTS]


def make_reranker(checkpoint: TinyCheckpoint, folder: Path) -> Reranker:
    """Copy a checkpoint, with smaller logits and the tokens "yes" and "no"."""
    with_tokenizer(checkpoint.path, folder)
    model = copy.deepcopy(checkpoint.model)
    model.model.norm.weight.data *= 0.05
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(folder)
    return Reranker(folder, model, tokenizer)


def assert_right(results: list[RerankOutput], wanted: list[float]) -> None:
    assert sorted(result.index for result in results) == list(range(len(wanted)))
    for result in results:
        assert result.document == DOCUMENTS[result.index]
        assert result.relevance_score == pytest.approx(wanted[result.index], abs=1e-4)
    scores = [result.relevance_score for result in results]
    assert scores == sorted(scores, reverse=True)


@DEVICES
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"max_num_batched_tokens": 70, "depth": 1}),
        ("gemma2", {"enable_prefix_caching": False}),  # softcaps its logits
        ("qwen3-tied", {"model_impl": "transformers"}),
    ],
)
def test_scores_equal_transformers(
    tiny: Any, tmp_path: Path, device: str, variant: str, options: dict[str, Any]
) -> None:
    """Runs twice, the second time from the prefix cache."""
    reranker = make_reranker(tiny(variant), tmp_path / "model")
    wanted = reranker.scores()
    assert max(wanted) - min(wanted) > 0.01
    with LLM(reranker.path, device=device, **{**OPTIONS, **options}) as llm:
        for _ in range(2):
            assert_right(llm.rerank(QUERY, DOCUMENTS), wanted)
        is_cached = llm.engine.core.scheduler.num_cache_hits > 0
        assert is_cached == options.get("enable_prefix_caching", True)
        best = llm.rerank(QUERY, DOCUMENTS, top_n=2)
        assert [each.index for each in best] == sorted(range(6), key=lambda i: -wanted[i])[:2]
        [other] = llm.rerank(QUERY, DOCUMENTS[:1], instruction="Judge.")
        right = reranker.relevance(DOCUMENTS[0], "Judge.")
        assert other.relevance_score == pytest.approx(right, abs=1e-4)


def test_two_ranks(tiny: Any, tmp_path: Path) -> None:
    reranker = make_reranker(tiny("qwen3"), tmp_path / "model")
    with engines_of(2), LLM(reranker.path, device="cpu", **OPTIONS) as llm:
        assert_right(llm.rerank(QUERY, DOCUMENTS), reranker.scores())


def test_beside_embeddings_and_completions(tiny: Any, tmp_path: Path) -> None:
    reranker = make_reranker(tiny("qwen3"), tmp_path / "model")
    wanted = reranker.scores()
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    found: list[Any] = []
    with LLM(reranker.path, device="cpu", **OPTIONS, depth=1) as llm:
        alone = [each.embedding for each in llm.embed(DOCUMENTS[2:], "mean", use_tqdm=False)]
        embed = threading.Thread(
            target=lambda: found.extend(llm.embed(DOCUMENTS[2:] * 4, "mean", use_tqdm=False))
        )
        generate = threading.Thread(target=lambda: llm.generate([[1, 2]] * 4, greedy, False))
        for thread in (embed, generate):
            thread.start()
        results = [llm.rerank(QUERY, DOCUMENTS) for _ in range(3)]
        for thread in (embed, generate):
            thread.join()
    for each in results:
        assert_right(each, wanted)
    for index, each in enumerate(found):
        assert each.embedding == pytest.approx(alone[index % 4], abs=1e-5)


def test_invalid_calls(tiny: Any, tmp_path: Path) -> None:
    reranker = make_reranker(tiny("qwen3"), tmp_path / "model")
    with LLM(reranker.path, device="cpu", **OPTIONS) as llm:
        assert llm.rerank(QUERY, []) == []
        assert llm.rerank(QUERY, iter(DOCUMENTS)) == llm.rerank(QUERY, DOCUMENTS)
        with pytest.raises(RequestError, match="documents must be a list of texts, got 'one'"):
            llm.rerank(QUERY, "one")
        with pytest.raises(RequestError, match="documents must be a string, got 3"):
            llm.rerank(QUERY, [3])  # type: ignore[list-item]
        with pytest.raises(RequestError, match="query must be a string"):
            llm.rerank(None, ["one"])  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="documents must be a list of texts, got 3"):
            llm.rerank(QUERY, 3)  # type: ignore[arg-type]
        for top_n in (0, 2.5, "3", True):
            with pytest.raises(RequestError, match=f"top_n must be .* at least 1, got {top_n!r}"):
                llm.rerank(QUERY, DOCUMENTS, top_n=top_n)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"documents\[1\]: the prompt has .* only 512 fit"):
            llm.rerank(QUERY, ["one", "x" * 500])
        assert llm.is_finished()


@pytest.mark.parametrize(
    ("skips", "match"),
    [(False, 'its tokenizer has no tokens "yes" and "no"'), (True, "no tokenizer")],
)
def test_models_that_cannot_rerank(tiny: Any, tmp_path: Path, skips: bool, match: str) -> None:
    folder = with_tokenizer(tiny("qwen3").path, tmp_path / "model")
    options = {**OPTIONS, "skip_tokenizer_init": skips}
    with (
        LLM(folder, device="cpu", **options) as llm,
        pytest.raises(RequestError, match=match),
    ):
        llm.rerank(QUERY, DOCUMENTS)
