"""`nanovllm bench latency`, `throughput` and `serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.report.waits import draw, waits
from nanovllm.cli import bench_serve, main
from nanovllm.cli.bench_serve import Load, Measured, make_prompts, summary
from nanovllm.errors import ConfigError
from tests.bench.test_steps import CONFIG
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running

MEASURED = [
    Measured(0.0, 0.1, (0.02, 0.02), 1.0, 10, 20),
    Measured(1.0, 0.3, (0.02, 0.08), 1.0, 10, 20),
    Measured(2.0, error="refused"),
]


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "results.jsonl"
    sizes = "--batch 1 3 --input-len 16 --output-len 5 --repeats 1 --max-num-seqs 2"
    command = f"bench latency {tmp_path} {sizes} --device cpu --json {path}"
    assert main(command.split()) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["batch"] for record in records] == [1, 3]
    for record in records:
        assert (record["input_len"], record["output_len"]) == (16, 5)
        whole_ms = 1000 * 5 * record["batch"] / record["tokens_per_second"]
        assert record["first_token_ms"] > 0
        assert record["step_ms"] > 0
        assert record["first_token_ms"] + 4 * record["step_ms"] == pytest.approx(whole_ms)
    shown = capsys.readouterr()
    assert shown.out.count("ms/step") == 2
    for batch in (1, 3):
        assert f"batch {batch}:   0%|" in shown.err
    assert main([*command.split()[:-1], str(tmp_path)]) == 2
    assert f"cannot write {tmp_path}: Is a directory" in capsys.readouterr().err


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "results.jsonl"
    sizes = "--num-prompts 3 --input-len 16 --output-len 4 --repeats 1 --energy"
    command = f"bench throughput {tmp_path} {sizes} --device cpu --json {path}"
    assert main(command.split()) == 0
    record = json.loads(path.read_text())
    assert (record["batch"], record["input_len"], record["output_len"]) == (3, 16, 4)
    rate = record["tokens_per_second"]
    out = capsys.readouterr().out
    assert f"{rate:,.1f} output tok/s, {5 * rate:,.1f} tok/s with the prompts" in out
    assert "the energy of this device is not counted" in out
    assert "joules_per_token" not in record


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM(text="Hello, you!"), api_key=("secret",)) as server:
        yield server


def bench(server: Running, *arguments: str) -> int:
    return main(["bench", "serve", "--url", server.url, "--api-key", "secret", *arguments])


@pytest.mark.parametrize("rate", ["nan", "0"])
def test_invalid_rates_are_refused(
    fake: Running, rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench(fake, "--rate", rate, "--num-requests", "2")
    assert "argument --rate" in capsys.readouterr().err


@pytest.mark.parametrize("rule", [["--concurrency", "3"], ["--rate", "200"]])
def test_a_load_is_measured(
    fake: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path, rule: list[str]
) -> None:
    path = tmp_path / "result.json"
    sizes = ["--num-requests", "12", "--prompt-words", "20", "--shared-words", "5"]
    assert bench(fake, *rule, *sizes, "--json", str(path)) == 0
    result = json.loads(path.read_text())
    assert result["num_requests"] == len(result["requests"]) == 12
    assert result["num_failed"] == 0
    assert result["tokens_per_second"] > 0
    times = result["first_token_ms"]
    assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert "first token" in capsys.readouterr().out
    assert draw(waits(result["requests"])).count("<polyline") == 3


def test_an_interrupt_reports_the_finished_requests(
    fake: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(
        client: Any, model: str, prompts: list[str], load: Load, done: list[Measured]
    ) -> None:
        assert (len(prompts), model) == (64, "tiny")
        done += MEASURED[:1]
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_serve, "send_all", interrupted)
    assert bench(fake) == 130
    assert capsys.readouterr().out.split()[:5] == ["num", "requests", "1", "num", "failed"]


def test_a_load_from_a_file_counts_errors(
    fake: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    file.write_text("\n".join(map(json.dumps, [chat, {"prompt": [7, 8]}, {"prompt": "x" * 5000}])))
    assert bench(fake, "--prompts", str(file)) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "num requests 3 num failed 1 " in words
    assert "errors the server returned 400: " in words


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for text in ("", "no json", '{"other": 1}', "[1]"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            make_prompts(Load(prompts=str(path)))


def test_goodput_counts_requests_within_the_limits() -> None:
    result = summary(MEASURED, Load(goodput_first_token_ms=200.0))
    assert result["seconds"] == 2.0
    assert result["tokens_per_second"] == 20
    assert result["goodput_requests_per_second"] == 0.5
    assert result["first_token_ms"]["p50"] == pytest.approx(200)
    assert result["errors"] == {"refused": 1}
    for load, goodput in (
        (Load(), 1.0),
        (Load(goodput_inter_token_ms=30.0), 0.5),
        (Load(goodput_end_to_end_ms=900.0), 0.0),
    ):
        assert summary(MEASURED, load)["goodput_requests_per_second"] == goodput
    assert summary(MEASURED[2:], Load())["first_token_ms"] == {}


def test_the_distributions_are_drawn() -> None:
    names = ("first_token", "gaps", "seconds", "error")
    requests = [{name: getattr(one, name) for name in names} for one in MEASURED]
    svg = ElementTree.fromstring(draw(waits(requests)))
    lines = [each.get("points", "").split() for each in svg.iter() if "polyline" in each.tag]
    assert [len(points) for points in lines] == [2, 4, 2]
    assert lines[0][-1].split(",")[1] == lines[1][-1].split(",")[1] == "34.0"  # 100%


def test_random_prompts_share_their_beginning_and_nothing_else() -> None:
    load = Load(num_requests=5, prompt_words=50, shared_words=20, seed=1)
    prompts = make_prompts(load)
    beginnings = {" ".join(prompt.split()[:20]) for prompt in prompts}
    assert len(beginnings) == 1
    assert len(set(prompts)) == 5
    assert prompts == make_prompts(load)
