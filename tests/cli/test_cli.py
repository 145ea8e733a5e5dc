"""The command line as users see it: real processes, pipes and a real terminal."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nanovllm import __version__
from nanovllm.checkpoint.hub import ALIASES
from nanovllm.cli import build_parser, main, parse
from nanovllm.cli.options import dashed, engine_config, sampling_params
from nanovllm.cli.start import set_child_threads
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.models.registry import FAMILIES
from nanovllm.sampling_params import SamplingParams
from tests.cli.terminal_process import ROOT, TerminalProcess, run_program


def nanovllm(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_program("-m", "nanovllm", *arguments, stdin=stdin)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"nanovllm {__version__}\n"


def test_help_has_examples_and_does_not_load_torch() -> None:
    script = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["numpy"] = None
from nanovllm.cli import main
for arguments in sys.argv[1:]:
    try:
        code = main(arguments.split())
    except SystemExit as end:
        code = end.code
    print("exit code", code)
"""
    asked = ["", "--help", "generate -h", "chat --help", "bench -h", "bench latency -h"]
    asked += ["bench serve -h", "trace -h", "models -h"]
    command = [sys.executable, "-c", script, *asked]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    *shown, rest = result.stdout.split("exit code 0\n")
    assert (len(shown), rest) == (len(asked), "")
    assert all("examples:\n  nanovllm " in text for text in shown)


@pytest.mark.parametrize(
    "command",
    [
        "generate",
        "chat",
        "trace",
        "bench latency",
        "bench serve",
    ],
)
def test_every_option_states_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    for paragraph in capsys.readouterr().out.split("\n  --")[1:]:
        name, text = paragraph.split(maxsplit=1)
        assert name == "json" or "(default:" in text, f"{command} --{name}"


def test_options_reach_the_engine() -> None:
    arguments = "generate x --model m --max_num_seqs 3 --kvcache-block-size=16 --no-prefix-caching"
    arguments += " --revision v2 --target-inter-token-ms 25"
    sampling = "--max_tokens=9 --top-k 5 --stop A_B --stop c --ignore_eos --seed -1"
    args = build_parser().parse_args(dashed(f"{arguments} {sampling}".split()))
    assert engine_config(args) == EngineConfig(
        "m",
        revision="v2",
        max_num_seqs=3,
        kvcache_block_size=16,
        enable_prefix_caching=False,
        target_inter_token_ms=25.0,
    )
    assert sampling_params(args) == SamplingParams(
        temperature=0.0, max_tokens=9, top_k=5, stop=["A_B", "c"], ignore_eos=True, seed=-1
    )


@pytest.mark.parametrize(
    "command", ["generate x", "chat", "serve", "batch in -o out", "bench latency"]
)
def test_every_command_has_the_engine_options_of_vllm(command: str) -> None:
    options = "--model m -tp 2 --max-model-len 8k --max-num-batched-tokens 2K --dtype half"
    options += " --block-size 32 --num-gpu-blocks-override 7 --no-enable-prefix-caching"
    args = parse(f"{command} {options} --kv-cache-dtype fp8 --trust-remote-code".split())
    config = engine_config(args)
    assert (config.model, config.tensor_parallel_size) == ("m", 2)
    assert (config.max_model_len, config.max_num_batched_tokens) == (8000, 2048)
    assert (config.dtype, config.kv_cache_dtype) == ("float16", "fp8")
    assert (config.kvcache_block_size, config.num_kvcache_blocks) == (32, 7)
    assert not config.enable_prefix_caching
    assert parse([*command.split(), "--threads", "3"]).threads == 3


@pytest.mark.parametrize("options", ["--enable-lora", "--lora-modules a=x b=y"])
def test_adapters_are_not_supported(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = options.split()[0]
    with pytest.raises(ConfigError, match=f"{flag}: LoRA adapters are not supported"):
        engine_config(parse(["serve", *options.split()]))
    engine_config(parse(["serve", "--no-enable-lora", "--media-io-kwargs", "{}"]))
    assert "--media-io-kwargs has no effect: images are always read" in capsys.readouterr().err


@pytest.mark.parametrize("limits", ["image=1", '{"image": 1, "video": 0}', "image=1,video=0"])
def test_the_number_of_images(limits: str) -> None:
    assert engine_config(parse(["serve", "--limit-mm-per-prompt", limits])).max_images == 1
    with pytest.raises(ConfigError, match="limit_mm_per_prompt must be a dict"):
        engine_config(parse(["serve", "--limit-mm-per-prompt", "5"]))


@pytest.mark.parametrize("command", ["chat m", "serve m", "batch m in -o out", "bench latency m"])
def test_the_model_is_the_first_argument(command: str) -> None:
    assert engine_config(parse(command.split())).model == "m"
    with pytest.raises(ConfigError, match="give the model once, not as m and other"):
        engine_config(parse([*command.split(), "--model", "other"]))


def test_a_file_of_options_may_follow_the_model_and_the_input(tmp_path: Path) -> None:
    file = tmp_path / "batch.yaml"
    file.write_text("model: m\nserved-model-name: [a, b]\nraw: true\noverwrite: false\n")
    for command, model in (("batch in", "m"), ("batch other in", "other")):
        args = parse(f"{command} -o out --config {file}".split())
        assert (engine_config(args).model, str(args.input)) == (model, "in")
        assert (args.raw, args.overwrite) == (True, False)


def test_threads_of_engines_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    set_child_threads(None, EngineConfig("m"))
    assert os.environ["OMP_NUM_THREADS"] == "7"
    set_child_threads(3, EngineConfig("m"))
    assert os.environ["OMP_NUM_THREADS"] == "3"
    with pytest.raises(ConfigError, match="--threads is for one process"):
        set_child_threads(3, EngineConfig("m", tensor_parallel_size=2))


def test_underscores_are_dashes_in_names_only() -> None:
    given = ["a_b", "--max_tokens", "c_d", "--stop=e_f", "-x_y", "--", "--g_h"]
    assert dashed(given) == ["a_b", "--max-tokens", "c_d", "--stop=e_f", "-x_y", "--", "--g_h"]


def test_generate_writes_json_for_every_line_of_stdin(
    pipe: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["The capital of France is", "2, 4, 6, 8,"]
    pipe("\n".join([prompts[0], "", prompts[1]]))
    options = ["--lines", "--raw", "--json", "--max_tokens", "6", "--threads", "1"]
    num_threads = torch.get_num_threads()
    try:
        assert main(["generate", *options]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(num_threads)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert "Paris" in answers[0]["text"]
    assert "10" in answers[1]["text"]
    for answer in answers:
        assert list(answer) == ["prompt", "text", "token_ids", "finish_reason"]
        assert (len(answer["token_ids"]), answer["finish_reason"]) == (6, "length")


def test_models_lists_every_architecture_and_short_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr()
    assert main(["models", "--json"]) == 0
    as_json = capsys.readouterr()
    assert shown.err == as_json.err == ""
    records = [json.loads(line) for line in as_json.out.splitlines()]
    assert [record["architecture"] for record in records] == list(FAMILIES)
    short_names: dict[str, str] = {}
    expected: list[str] = []
    for record in records:
        assert record["examples"]
        short_names |= record["short_names"]
        assert record["licenses"] == {name: ALIASES[name].license for name in record["short_names"]}
        expected += [record["architecture"], *(f"  {example}" for example in record["examples"])]
    assert short_names == {alias: each.hub_id for alias, each in ALIASES.items()}
    lines = shown.out.splitlines()
    assert [line.partition(", short: ")[0] for line in lines] == expected
    for alias, hub_id in short_names.items():
        assert f"  {hub_id}, short: {alias} ({ALIASES[alias].license})" in lines


@pytest.mark.slow
def test_chat_in_a_pipe_prints_replies_only() -> None:
    """A chat keeps its history until /reset: then the same question has the same reply."""
    question = "What is the capital of France? Answer in one word."
    lines = [question, "And of Italy?", "/reset", question, "/exit", "Never asked."]
    result = nanovllm("chat", "--temperature", "0", "--max-tokens", "8", stdin="\n".join(lines))
    assert (result.returncode, result.stderr) == (0, "")
    answers = result.stdout.splitlines()
    assert "Paris" in answers[0]
    assert "Rome" in answers[1]
    assert answers[2:] == answers[:1]


@pytest.fixture
def chat() -> Iterator[TerminalProcess]:
    options = ["--ignore-eos", "--max-tokens", "3000"]
    process = TerminalProcess("-m", "nanovllm", "chat", *options)
    yield process
    process.close()


@pytest.mark.slow
def test_ctrl_c_stops_the_reply_and_not_the_chat(chat: TerminalProcess) -> None:
    for number, question in enumerate(["Tell me a story.", "Tell me another one."], start=1):
        chat.wait_for(lambda _, n=number: chat.num_prompts == n)  # type: ignore[misc]
        chat.send(question + "\r")
        chat.wait_for(lambda text, q=question: len(text.partition(q)[2]) > 200)  # type: ignore[misc]
        chat.send("\x03")
        chat.wait_for(lambda text, n=number: text.count("[stopped]") == n)  # type: ignore[misc]
    chat.wait_for(lambda _: chat.num_prompts == 3)
    chat.send("/help\r")
    chat.wait_for(lambda text: "forget the conversation" in text and chat.num_prompts == 4)
    chat.send("\x04")
    assert chat.wait() == 0
    assert "Traceback" not in chat.text
    assert "KeyboardInterrupt" not in chat.text


@pytest.mark.slow
def test_ctrl_c_in_a_long_prompt_ends_generate_at_once(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("A sentence that goes on and on. " * 400)
    options = ["--file", str(tmp_path / "long"), "--max-model-len", "8192"]
    process = TerminalProcess("-m", "nanovllm", "generate", *options)
    try:
        process.wait_for(lambda text: "KV cache" in text)
        before = process.cpu_seconds()
        while process.cpu_seconds() < before + 0.5:  # wait until the prefill is running
            time.sleep(0.01)
        before, ended = process.cpu_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN)
        process.send("\x03")
        assert process.wait() == 130
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = now.ru_utime + now.ru_stime - ended.ru_utime - ended.ru_stime
        assert spent - before < 4.0, "the rest of the prompt takes several times that"
        assert "Traceback" not in process.text
        assert "terminate" not in process.text
    finally:
        process.close()
