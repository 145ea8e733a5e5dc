"""Commands that ask a server: chat, generate, trace, bench serve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from nanovllm.bench import load
from nanovllm.bench.load import (
    Limits,
    Measured,
    random_prompts,
    read_prompts,
    summary,
    table,
    waits,
)
from nanovllm.bench.plot import draw
from nanovllm.cli import bench_serve, main
from nanovllm.errors import ConfigError
from tests.server.fake_llm import FakeLLM
from tests.server.running import Running, running

pytestmark = pytest.mark.usefixtures("nothing")


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM(text="Hello, you!"), api_keys=("secret",)) as server:
        yield server


def options(server: Running) -> list[str]:
    return ["--url", server.url, "--api-key", "secret"]


def test_generate_asks_all_prompts_of_a_server(
    fake: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    del fake.llm.asked[:]
    command = ["generate", *options(fake), "--json", "--temperature", "0.5", "--top-k", "7"]
    assert main([*command, "one", "two"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two"]
    assert lines[0] == {"prompt": "one", "text": "Hello, you!", "finish_reason": "stop"}
    params = fake.llm.asked[0][1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 128)


def test_a_schema_is_sent_as_every_server_reads_it(fake: Running, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object"}')
    assert main(["generate", *options(fake), "--json-schema", str(path), "x"]) == 0
    assert fake.llm.asked[-1][1].structured_outputs["json"] == {"type": "object"}


def test_generate_raw_continues_a_text(fake: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *options(fake), "--raw", "abc"]) == 0
    assert "Hello, you!" in capsys.readouterr().out


def test_chat_remembers_what_was_said(
    fake: Running, capsys: pytest.CaptureFixture[str], pipe: Callable[[str], None]
) -> None:
    pipe("first\nsecond\n")
    del fake.llm.asked[:]
    assert main(["chat", *options(fake)]) == 0
    assert capsys.readouterr().out == "Hello, you!\nHello, you!\n"
    assert len(fake.llm.asked[1][0]) > len(fake.llm.asked[0][0]) + len("Hello, you!")


@pytest.mark.parametrize(
    "arguments", [["--device", "cpu"], ["--threads", "1"], ["--no-prefix-caching"]]
)
def test_options_of_an_engine_do_not_fit_a_url(
    fake: Running, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["generate", *options(fake), *arguments, "x"]) == 2
    assert "--url asks another" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_a_key_without_a_server_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--model", "/no/such/model", "--api-key", "secret"]) == 2
    assert "--api-key is for a server" in capsys.readouterr().err


def test_wrong_keys_and_servers_are_said(fake: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--url", fake.url, "x"]) == 1
    assert "401" in capsys.readouterr().err
    assert main(["trace", "--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers" in capsys.readouterr().err


def test_a_trace_is_written(fake: Running, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert main(["trace", *options(fake), "--seconds", "0.2", "--out", str(path)]) == 0
    assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_a_trace_of_no_time_is_refused(
    fake: Running, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["trace", *options(fake), "--seconds", seconds])
    assert "argument --seconds" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["nan", "0"])
def test_a_load_without_a_rate_is_refused(
    fake: Running, rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *options(fake), "--rate", rate, "--num-requests", "2"]) == 2
    assert "--rate must be more than 0" in capsys.readouterr().err


@pytest.mark.parametrize("rule", [["--concurrency", "3"], ["--rate", "200"]])
def test_a_load_is_measured(
    fake: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path, rule: list[str]
) -> None:
    path, picture = tmp_path / "result.json", tmp_path / "result.svg"
    command = ["bench", "serve", *options(fake), *rule, "--num-requests", "12", "--json", str(path)]
    command += ["--plot", str(picture)]
    assert main([*command, "--prompt-words", "20", "--shared-words", "5"]) == 0
    assert picture.read_text().count("<polyline") == 3
    result = json.loads(path.read_text())
    assert result["num_requests"] == len(result["requests"]) == 12
    assert result["num_failed"] == 0
    assert result["tokens_per_second"] > 0
    times = result["first_token_ms"]
    assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert "first token" in capsys.readouterr().out


def test_an_interrupt_shows_the_requests_that_have_ended(
    fake: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*given: Any) -> None:
        on_done = given[4]
        for _ in range(3):
            on_done(Measured(0.0, 0.1, (0.02, 0.02), 1.0, 10, 20))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_serve, "run_load", interrupted)
    assert main(["bench", "serve", *options(fake)]) == 130
    assert "requests        3, 0 failed" in capsys.readouterr().out


def test_no_requests_are_sent_after_the_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow server, as on a CPU, less is asked by default."""
    clock = [0.0]
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class SlowClient:
        async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
            clock[0] += 8.0
            yield {"choices": [{"text": "x"}]}

    client: Any = SlowClient()
    one_by_one = load.Load(rate=None, concurrency=1, max_tokens=1)
    measured = asyncio.run(load.run_load(client, "m", ["x"] * 9, one_by_one, max_seconds=20.0))
    assert [one.sent for one in measured] == [0.0, 8.0, 16.0]


def test_a_load_from_a_file_counts_errors(
    fake: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    file.write_text("\n".join(map(json.dumps, [chat, {"prompt": [7, 8]}, {"prompt": "x" * 5000}])))
    assert main(["bench", "serve", *options(fake), "--prompts", str(file)]) == 1
    out = capsys.readouterr().out
    assert "3, 1 failed" in out
    assert "1 x the server answered 400" in out


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for text in ("", "no json", '{"other": 1}', "[1]"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_prompts(str(path))


def test_a_summary_counts_what_keeps_the_limits() -> None:
    measured = [
        Measured(0.0, 0.1, (0.02, 0.02), 1.0, 10, 20),
        Measured(1.0, 0.3, (0.02, 0.08), 1.0, 10, 20),
        Measured(2.0, error="refused"),
    ]
    result = summary(measured, Limits(first_token=0.2))
    assert result["seconds"] == 2.0
    assert result["tokens_per_second"] == 20
    assert result["goodput_requests_per_second"] == 0.5
    assert result["first_token_ms"]["p50"] == pytest.approx(200)
    assert result["errors"] == {"refused": 1}
    assert summary(measured, Limits(gap=0.03))["goodput_requests_per_second"] == 0.5
    assert "p99" in table(result)
    svg = ElementTree.fromstring(draw(waits(measured)))
    lines = [each.get("points", "").split() for each in svg.iter() if "polyline" in each.tag]
    assert [len(points) for points in lines] == [2, 4, 2]
    assert lines[0][-1].split(",")[1] == lines[1][-1].split(",")[1] == "34.0"  # all of them
    assert summary(measured[2:], Limits())["first_token_ms"] is None


def test_random_prompts_share_their_beginning_and_nothing_else() -> None:
    prompts = random_prompts(5, 50, 20, seed=1)
    beginnings = {" ".join(prompt.split()[:20]) for prompt in prompts}
    assert len(beginnings) == 1
    assert len(set(prompts)) == 5
    assert prompts == random_prompts(5, 50, 20, seed=1)
