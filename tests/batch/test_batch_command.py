"""`nanovllm batch` with a real engine: all kinds of rows, and kills at random moments."""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.cli import main
from tests.batch.test_jobs import read_lines, write_rows
from tests.serve.byte_model import make_byte_file

OPTIONS = [
    *("--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--block-size", "16"),
    *("--num-kvcache-blocks", "256", "--max-num-seqs", "16", "--served-model-name", "tiny"),
]
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_file(tmp_path_factory.mktemp("model"))


def command(model: Path, path: Path, output: Path, *options: str) -> list[str]:
    names = [str(path), "-o", str(output), "--model", str(model)]
    return [sys.executable, "-m", "nanovllm", "batch", *names, *OPTIONS, *options]


def batch(model: Path, path: Path, output: Path, *options: str) -> tuple[int, str]:
    """Run the command in this process; return its exit code and its stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        return main(command(model, path, output, *options)[3:]), shown.getvalue()


def by_id(output: Path) -> dict[str, Any]:
    return {line.get("custom_id") or line["index"]: line for line in read_lines(output)}


@pytest.mark.slow
def test_rows_of_every_kind(model: Path, tmp_path: Path) -> None:
    request = {"method": "POST", "url": "/v1/chat/completions"}
    embed = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "abc"}}
    rows: list[Any] = [
        {"prompt": "abc", "max_tokens": 4, "topic": {"deep": [1]}, "text": "mine"},
        {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 1.0, "n": 2},
        {**CHAT, "id": 7},
        {"custom_id": "a", **request, "body": {**CHAT, "model": "tiny", "temperature": 1}},
        embed,
        {"custom_id": "b", **request, "body": {**CHAT, "model": "another"}},
        {"custom_id": "c", **request, "body": {**CHAT, "temperature": 9}},
        {"custom_id": "d", "method": "POST", "url": "/v1/other", "body": {}},
        {"question": "?"},
        {"prompt": "x" * 1000},
    ]
    path, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    code, shown = batch(model, path, output, "--max-tokens", "6")
    assert code == 1, shown
    assert "5 of 10 rows completed" in shown
    lines = by_id(output)
    assert lines[0]["input_text"] == "mine"
    assert lines[0]["topic"] == {"deep": [1]}
    assert lines[0]["usage"]["completion_tokens"] <= 4
    assert {"index", "text", "finish_reason", "usage"} <= lines[0].keys()
    assert len(lines[1]["text"]) == len(lines[1]["finish_reason"]) == 2
    assert lines[2]["id"] == 7
    answer = lines["a"]
    assert answer["error"] is None
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert answer["response"]["body"]["created"] == 0
    assert len(lines["e"]["response"]["body"]["data"][0]["embedding"]) > 1
    errors = {line["index"]: line for line in read_lines(Path(f"{output}.errors.jsonl"))}
    assert errors[5]["custom_id"] == "b"
    codes = {index: line["error"]["code"] for index, line in errors.items()}
    assert codes == {
        5: "model_not_found",
        6: "invalid_request_error",
        7: "invalid_url",
        8: "invalid_row",
        9: "context_length_exceeded",
    }
    code, shown = batch(model, path, output, "--max-tokens", "7")
    assert code == 2
    assert "started with a different max_tokens; use --overwrite" in shown
    code, _ = batch(model, path, output, "--max-tokens", "6", "--max-num-seqs", "8")
    assert code == 1
    assert by_id(output) == lines
    code, shown = batch(model, path, tmp_path / "shared.jsonl", "--max-tokens", "6", "-dp", "2")
    assert code == 1, shown
    others = by_id(tmp_path / "shared.jsonl")
    vectors = [
        each.pop("e")["response"]["body"]["data"][0]["embedding"] for each in (others, lines)
    ]
    assert others == lines
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-6)  # threads change the rounding


def mixed_rows(count: int) -> list[Any]:
    rng = random.Random(0)
    rows: list[Any] = []
    for index in range(count):
        text = f"part {rng.randrange(5)} of a text " * 2 + str(index)
        fields = {"max_tokens": rng.randrange(1, 12), "temperature": rng.choice([0, 1.0])}
        if index % 3:
            rows.append({"prompt": text, **fields})
        else:
            body = {"messages": [{"role": "user", "content": text}], **fields}
            name = {"custom_id": f"row-{index}", "method": "POST", "url": "/v1/chat/completions"}
            rows.append({**name, "body": body})
    return rows


@pytest.mark.slow
@pytest.mark.endurance
def test_killed_at_any_moment_it_ends_as_if_undisturbed(
    model: Path, tmp_path: Path, count: Callable[..., int]
) -> None:
    num_rows = count(2000, few=60)
    path = write_rows(tmp_path / "in.jsonl", mixed_rows(num_rows))
    code, shown = batch(model, path, tmp_path / "whole.jsonl")
    assert code == 0, shown
    output, rng = tmp_path / "killed.jsonl", random.Random(1)
    for _ in range(count(20, few=1)):
        num_lines = rng.randrange(num_rows)
        with subprocess.Popen(command(model, path, output), stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and count_lines(output) < num_lines:
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
    assert batch(model, path, output)[0] == 0
    assert len(read_lines(output)) == len(read_lines(tmp_path / "whole.jsonl"))
    assert by_id(output) == by_id(tmp_path / "whole.jsonl")
    assert json.loads(output.read_text().splitlines()[-1])


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
