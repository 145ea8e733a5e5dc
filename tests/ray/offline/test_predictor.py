"""`Predictor` in Ray Data's map_batches."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nanovllm.errors import ConfigError
from tests.parallel.leftovers import descendants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

ROWS = [
    {"id": 0, "prompt": "Hello", "max_tokens": 3, "text": "mine"},
    {"id": 1, "prompt_token_ids": [5, 6, 7], "temperature": 1.0, "logprobs": 1},
    {"id": 2, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    | {"return_token_ids": True, "prompt_logprobs": 0},
    {"id": 3, "prompt": "Hello", "temperature": 9.0},
    {"id": 4, "prompt": "Hello", "prompt_token_ids": [1]},
    {"id": 5},
]
NAMES = {name: None for row in ROWS for name in row}


def test_rows_get_an_answer_or_an_error(
    model: Path, engine_options: dict[str, Any], tmp_path: Path
) -> None:
    import pyarrow as pa
    import ray

    from nanovllm.ray import Predictor

    class Fragile(Predictor):
        """A predictor that loses its engine once, during a batch."""

        def __call__(self, batch: Any) -> Any:
            marker = tmp_path / "has-died"
            if not marker.exists():
                marker.touch()
                for pid in descendants(os.getpid()):
                    os.kill(int(pid), signal.SIGKILL)
            return super().__call__(batch)

    options = {"model": model, "sampling": {"max_tokens": 5, "temperature": 0}, **engine_options}
    dataset = ray.data.from_items([{**NAMES, **row} for row in ROWS])
    answered = dataset.map_batches(
        Fragile, fn_constructor_kwargs=options, batch_size=3, concurrency=1
    )
    found = {row["id"]: row for row in answered.take_all()}
    assert (tmp_path / "has-died").exists()
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert found[0]["input_text"] == "mine"
    for index, num_tokens in enumerate([3, 5, 4]):
        row = found[index]
        assert row["error"] is None
        assert isinstance(row["text"], str)
        assert row["finish_reason"] == "length"
        assert row["usage"]["completion_tokens"] == num_tokens
    assert found[1]["input_logprobs"] == 1
    assert len(json.loads(found[1]["logprobs"])["tokens"]) == 5
    assert len(json.loads(found[2]["token_ids"])) == 4
    assert len(json.loads(found[2]["prompt_logprobs"])) == found[2]["usage"]["prompt_tokens"]
    assert found[3]["error"]["code"] == "invalid_request_error"
    assert "temperature" in found[3]["error"]["message"]
    assert [found[i]["error"]["code"] for i in (4, 5)] == ["invalid_row"] * 2
    assert [found[i]["text"] for i in (3, 4, 5)] == [None] * 3
    again = Predictor(**options)(pa.Table.from_pylist([{**NAMES, **row} for row in ROWS]))
    # Other rows in the batch change the rounding of its logprobs.
    rounded = {"logprobs": None, "prompt_logprobs": None}
    unasked = {"token_ids": None}  # a batch has no such column if no row requests it
    assert {row["id"]: unasked | row | rounded for row in again.to_pylist()} == {
        index: unasked | row | rounded for index, row in found.items()
    }


def test_options_are_checked_at_once(model: Path) -> None:
    from nanovllm.ray import Predictor

    with pytest.raises(ConfigError, match=r"sampling: .*max_tokens"):
        Predictor(model, sampling={"max_tokens": 0})
    with pytest.raises(TypeError, match="unheard_of"):
        Predictor(model, unheard_of=1)


def test_one_answer_may_stand_beside_several() -> None:
    pa = pytest.importorskip("pyarrow")
    from nanovllm.ray.predictor import _with_outputs

    table = pa.table({"prompt": ["a", "b", "c"]})
    answers: list[dict[str, Any]] = [{"text": "x"}, {"text": ["y", "z"]}, {"error": {}}]
    assert _with_outputs(table, answers)["text"].to_pylist() == [["x"], ["y", "z"], None]
