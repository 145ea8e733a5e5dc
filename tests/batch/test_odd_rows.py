"""Unusual rows of datasets: nulls, values that are not JSON, and fields of any type."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from nanovllm.batch.batch_engine import RowError, row_seed
from nanovllm.batch.rows import Row
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from tests.batch.test_jobs import read_lines, row_engine, run, write_rows
from tests.serve.fake_llm import FakeLLM

CHAT = [{"role": "user", "content": "Hello"}]


def answer(
    fields: dict[str, Any], llm: FakeLLM, index: int = 3, is_raw: bool = True
) -> dict[str, Any]:
    return asyncio.run(row_engine(llm, max_tokens=7, is_raw=is_raw)(Row(index, fields)))


def test_a_prompt_is_a_message_for_a_model_with_a_chat_template() -> None:
    chat = answer({"messages": CHAT}, FakeLLM())
    asked = answer({"prompt": "Hello", "echo": None}, FakeLLM(), is_raw=False)
    assert asked["usage"] == chat["usage"]
    assert (asked["prompt"], "messages" in asked) == ("Hello", False)
    raw = answer({"prompt": "Hello"}, FakeLLM())
    assert raw["usage"]["prompt_tokens"] < chat["usage"]["prompt_tokens"]
    base = FakeLLM()
    base.input_processor.tokenizer.chat_template = None
    for same in (
        answer({"prompt": "Hello"}, base, is_raw=False),
        answer({"prompt": [1] * raw["usage"]["prompt_tokens"]}, FakeLLM(), is_raw=False),
    ):
        assert same["usage"] == raw["usage"]
    with pytest.raises(RowError, match="echo needs --raw"):
        answer({"prompt": "Hello", "echo": True}, FakeLLM(), is_raw=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x"},
        {"messages": CHAT},
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}},
    ],
)
def test_null_is_nothing(fields: dict[str, Any]) -> None:
    nulls = {"seed": None, "max_tokens": None, "temperature": None}
    if "body" in fields:
        fields = {**fields, "body": {**fields["body"], **nulls}}
    else:
        fields = {"prompt": None, "messages": None, **nulls, **fields}
    llm = FakeLLM()
    answer(fields, llm)
    ((_, params),) = llm.asked
    assert (params.seed, params.max_tokens) == (row_seed(0, 3), 7)


def test_rows_of_responses_have_a_seed_as_well() -> None:
    llm, row = FakeLLM(), {"custom_id": "a", "url": "/v1/responses", "body": {"input": "x"}}
    answer(row, llm)
    answer({**row, "body": {"input": "x", "seed": 5}}, llm)
    assert [params.seed for _, params in llm.asked] == [row_seed(0, 3), 5]
    assert [params.max_tokens for _, params in llm.asked] == [7, 7]


@pytest.mark.parametrize("url", [["/v1/completions"], {"a": 1}, None, 3])
def test_any_url_is_an_error_of_its_row(url: Any) -> None:
    with pytest.raises(RowError, match="url one of"):
        answer({"custom_id": "a", "url": url, "body": {"prompt": "x"}}, FakeLLM())


def test_columns_of_answers_to_answers_are_kept() -> None:
    line: dict[str, Any] = {"prompt": "x"}
    for number in range(4):
        line = answer(line, FakeLLM(text=f"answer {number}"), index=number)
    assert sorted(str(value) for name, value in line.items() if "text" in name) == [
        f"answer {number}" for number in range(4)
    ]
    assert {value for name, value in line.items() if "index" in name} == {0, 1, 2, 3}


@dataclass
class TwoAnswers(FakeLLM):
    texts: list[str] = field(default_factory=list)

    async def generate(
        self, prompt: list[int], params: SamplingParams, **_: Any
    ) -> AsyncGenerator[StreamPiece, None]:
        best = [
            CompletionOutput(i, t, [1], None, None, "stop", None) for i, t in enumerate(self.texts)
        ]
        known = [None, *({i: Logprob(-0.5, 1, "a")} for i in prompt[1:])]
        own: dict[str, Any] = {"time_to_first_token": 0.1, "duration": 0.2, "outputs": best}
        own |= {"prompt_logprobs": known}
        yield StreamPiece(0, "", [], RequestOutput(0, None, prompt, "", [1], "stop", 3, **own))


def test_reasoning_of_any_answer_is_kept() -> None:
    llm = TwoAnswers(texts=["plain", "<think>thought</think>said"])
    line = answer({"messages": CHAT, "n": 2}, llm)
    assert line["text"] == ["plain", "said"]
    assert line["reasoning"] == [None, "thought"]


def test_rows_may_contain_the_reasoning_of_another_job() -> None:
    line = answer({"messages": CHAT, "reasoning": "Hm.", "thinking": "Hm."}, FakeLLM())
    assert (line["text"], line["reasoning"], line["thinking"]) == ("Hello!", "Hm.", "Hm.")


@pytest.mark.parametrize("prompt", [{"prompt": [1, 2, 3]}, {"messages": CHAT}])
def test_what_is_asked_for_is_answered(prompt: dict[str, Any]) -> None:
    asked = {"return_token_ids": True, "prompt_logprobs": 1}
    line = answer({**prompt, **asked}, TwoAnswers(texts=["a"]))
    assert line["token_ids"] == [1]
    assert (
        len(line["prompt_token_ids"])
        == len(line["prompt_logprobs"])
        == line["usage"]["prompt_tokens"]
    )
    assert line["input_prompt_logprobs"] == 1


def test_lone_surrogates_come_back(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "in.jsonl", [{"prompt": "x", "cut": "\ud83d", "whole": "\U0001f600"}]
    )
    (line,) = read_lines(run(path, tmp_path / "out.jsonl").output)
    assert (line["cut"], line["whole"]) == ("\ud83d", "\U0001f600")


def test_a_row_too_deep_to_be_written_stops_nothing(tmp_path: Path) -> None:
    depths = range(800, sys.getrecursionlimit(), 3)
    rows = [f'{{"prompt": "x", "deep": {"[" * depth}{"]" * depth}}}\n' for depth in depths]
    (tmp_path / "in.jsonl").write_text("".join(rows))
    progress_file = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert progress_file.num_done == len(rows)
    assert 0 < progress_file.num_errors < len(rows)
    assert "cannot be written as JSON" in progress_file.errors.read_text()
    assert run(tmp_path / "in.jsonl", progress_file.output, answer=None).num_done == len(rows)


def test_a_row_with_numbers_that_json_has_not_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "x", "score": math.nan}, {"prompt": "y"}])
    progress_file = run(path, tmp_path / "out.jsonl")
    assert [line["index"] for line in read_lines(progress_file.output)] == [1]
    assert "cannot be written as JSON" in progress_file.errors.read_text()


def test_values_of_parquet_come_back_as_text(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    values = {"when": datetime(2024, 1, 2, 3), "price": Decimal("1.50"), "ids": [1]}
    rows = [{"prompt": "x", "messages": None, **values, "nested": [{"when": values["when"]}]}]
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (line,) = read_lines(run(path, tmp_path / "out.jsonl").output)
    plain = {"when": "2024-01-02 03:00:00", "price": "1.50", "ids": [1]}
    assert line | plain | {"nested": [{"when": plain["when"]}]} == line
