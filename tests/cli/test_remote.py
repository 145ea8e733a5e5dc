"""Commands that use a server: chat, generate, trace."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanovllm.cli import main
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running

pytestmark = pytest.mark.usefixtures("nothing")


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM(text="Hello, you!"), api_key=("secret",)) as server:
        yield server


def options(server: Running) -> list[str]:
    return ["--url", server.url, "--api-key", "secret"]


def test_generate_sends_all_prompts_to_a_server(
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


def test_a_schema_is_sent_in_the_standard_form(fake: Running, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object"}')
    assert main(["generate", *options(fake), "--json-schema", str(path), "x"]) == 0
    assert fake.llm.asked[-1][1].structured_outputs["json"] == {"type": "object"}


def test_generate_raw_continues_a_text(fake: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *options(fake), "--raw", "abc"]) == 0
    assert "Hello, you!" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["generate", "one", "two"], ["chat"]])
def test_nothing_is_left_running(
    fake: Running,
    command: list[str],
    pipe: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Asyncio logs tasks that are destroyed before they end."""
    pipe("first\nsecond\n")
    assert main([command[0], *options(fake), *command[1:]]) == 0
    gc.collect()
    assert not [each for each in caplog.records if each.name == "asyncio"]


def test_chat_sends_the_history(
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
def test_engine_options_are_refused_with_a_url(
    fake: Running, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["generate", *options(fake), *arguments, "x"]) == 2
    assert "has no effect on the server at --url" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_a_key_without_a_server_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--model", "/no/such/model", "--api-key", "secret"]) == 2
    assert "--api-key is for a server" in capsys.readouterr().err


def test_wrong_keys_and_missing_servers_are_reported(
    fake: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--url", fake.url, "x"]) == 1
    assert "401" in capsys.readouterr().err
    assert main(["trace", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot connect" in capsys.readouterr().err


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
