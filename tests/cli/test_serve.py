"""`nanovllm serve`: vLLM's flags, YAML files, and shutdown."""

from __future__ import annotations

import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.cli import main, parse
from nanovllm.cli.serve import engine_config, server_options
from nanovllm.config import WHOLE_CONTEXT
from nanovllm.errors import ConfigError
from nanovllm.serve.server_options import read_sampling_defaults
from tests.serve.byte_model import make_byte_file

ROOT = Path(__file__).parent.parent.parent
ENGINE = ["--device", "cpu", "--dtype", "float", "--max-model-len", "1k", "--block-size", "16"]


def config_of(*arguments: str) -> Any:
    return engine_config(parse(["serve", *arguments]))


def test_flags_have_the_same_names_as_in_vllm() -> None:
    config = config_of(
        *(
            "org/name",
            "-tp",
            "2",
            "-dp",
            "3",
            "--max-model-len",
            "16K",
            "--dtype",
            "half",
            "--seed",
            "3",
        ),
        *("--no-enable-prefix-caching", "--block-size", "32", "--num-gpu-blocks-override", "7"),
        *("--max-num-seqs=4", "--gpu-memory-utilization", "0.5", "--enforce-eager"),
    )
    assert (config.model, config.tensor_parallel_size, config.max_model_len) == (
        "org/name",
        2,
        16384,
    )
    assert (config.dtype, config.seed, config.enable_prefix_caching) == ("float16", 3, False)
    assert (config.kvcache_block_size, config.num_kvcache_blocks) == (32, 7)
    assert (config.max_num_seqs, config.gpu_memory_utilization) == (4, 0.5)
    assert config.enforce_eager
    assert config.data_parallel_size == 3


def test_streams_have_a_target_and_batches_have_none() -> None:
    assert config_of().target_inter_token_ms == 25.0
    assert config_of("--target-inter-token-ms", "40").target_inter_token_ms == 40.0
    args = parse(["batch", "rows.jsonl", "-o", "answers.jsonl"])
    assert engine_config(args).target_inter_token_ms is None


def test_how_weights_are_quantized() -> None:
    assert config_of().quantization is None
    assert config_of("--quantization", "none").quantization is None
    assert config_of("--quantization", "fp8").quantization == "fp8"
    assert config_of("-q", "compressed-tensors").quantization == "compressed-tensors"


def test_the_type_of_the_kv_cache() -> None:
    assert config_of().kv_cache_dtype == "auto"
    for name in ("auto", "fp8", "fp8_e4m3"):
        assert config_of("--kv-cache-dtype", name).kv_cache_dtype == name


def test_without_a_model_the_built_in_one_is_served() -> None:
    config = config_of()
    assert (config.model, config.max_model_len) == ("smollm2", WHOLE_CONTEXT)


def test_the_command_line_overrides_the_config_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "model: org/name\nmax_num_seqs: 9\nenable-prefix-caching: false\nenforce-eager: true\n"
        "served-model-name: [one, two]\nport: 1\n"
    )
    for arguments in (["--config", str(file), "--port", "2"], ["--port=2", f"--config={file}"]):
        args = parse(["serve", *arguments])
        assert args.port == 2
        assert server_options(args, "m", {}).served_model_name == ("one", "two")
        config = engine_config(args)
        assert (config.model, config.max_num_seqs) == ("org/name", 9)
        assert (config.enable_prefix_caching, config.enforce_eager) == (False, True)
    file.write_text("api-key: 123\nmodel: other\nmax-model-len: 8k\n")
    args = parse(["serve", "org/name", "--config", str(file)])
    assert server_options(args, "m", {}).api_key == ("123",)
    assert (engine_config(args).model, engine_config(args).max_model_len) == ("org/name", 8000)


def test_the_demo_has_a_small_cache_unless_another_size_is_given(tmp_path: Path) -> None:
    def sizes(*arguments: str) -> tuple[int, int, int]:
        config = config_of(*arguments)
        cache = config.num_kvcache_blocks, config.kvcache_block_size
        return (*cache, config.max_num_batched_tokens)

    file = tmp_path / "server.yaml"
    file.write_text("demo: true\nblock-size: 64\n")
    assert sizes("--demo") == (192, 32, 256)
    assert sizes("--num-gpu-blocks-override", "9", "--demo") == (9, 32, 256)
    assert sizes("--config", str(file)) == (192, 64, 256)
    assert sizes("--config", str(file), "--no-demo") == (-1, 64, 16384)


def test_a_config_file_may_set_false_and_null(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "model: org/name\nenforce-eager: false\nrestart_engine: false\nverbose: false\n"
        "trust-remote-code: false\nrevision: null\napi-key:\n"
    )
    args = parse(["serve", "--config", str(file)])
    assert (args.enforce_eager, args.restart_engine, args.verbose) == (False, False, False)
    assert (args.revision, args.api_key) == (None, ())
    assert engine_config(parse(["serve", "other", "--config", str(file)])).model == "other"
    for option in ("nosuch: false", "port: false", "seed: false", "port: x", "enforce-eager: 1"):
        file.write_text(option)
        with pytest.raises(SystemExit):
            parse(["serve", "--config", str(file)])


@pytest.mark.parametrize(
    ("text", "message"),
    [("model: [a", "is not YAML"), ("config: other.yaml", "must not set config"), ("- a", "map")],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse(["serve", "--config", str(file)])
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*generation_config\.json"):
        read_sampling_defaults(str(tmp_path), {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-q", "bitsandbytes"], "quantization must be None or one of"),
        (["--quantization", "int3"], "quantization must be None or one of"),
        (["--kv-cache-dtype", "int8"], "kv_cache_dtype must be one of"),
        (["--speculative-config", "{}"], "method must be one of ngram, suffix, draft_model"),
        (["--speculative-config", "{"], "--speculative-config: invalid json_object value"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--max-model-len", "10x"], "--max-model-len: invalid tokens value: '10x'"),
        (["--max-model-len", "infk"], "--max-model-len: invalid tokens value: 'infk'"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--config", "/no/such/file"], "cannot read /no/such/file"),
        (["a", "--model", "b"], "give the model once"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1:0"),
        (["no-model", "--generation-config", "/no/such"], "cannot read /no/such/generation_config"),
        (["no-model", "--chat-template", "/no/such"], "cannot read /no/such"),
        (["no-model", "--chat-template", "{% if"], "--chat-template: the chat template cannot be"),
        (["--override-generation-config", "[1]"], "must be a JSON object with some of temperature"),
        (["--override-generation-config", '{"heat": 1}'], "with some of temperature, top_p, "),
        (["--override-generation-config", '{"top_p": 2}'], "top_p must be in (0, 1]; "),
        (["--api-key", "secret", ""], "api_key must be non-empty keys"),
        (["--request-timeout", "0"], "request_timeout must be above 0 seconds, got 0"),
        (["--request-timeout", "nan"], "request_timeout must be above 0 seconds, got nan"),
        (["--shutdown-timeout", "inf"], "shutdown_timeout must be 0 or more seconds, got inf"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout must be 0 or more seconds, got -1"),
        (["--limit-concurrency", "0"], "limit_concurrency must be at least 1, got 0"),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "/none.pem"], "with the certificate /none.pem: [Errno 2] No such file"),
        (["--ssl-certfile", __file__, "--ssl-keyfile", __file__], f"{__file__} with {__file__}: "),
    ],
)
def test_invalid_arguments_are_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused before the model is looked for."""
    model = ["/no/such/model"] if arguments[0].startswith("-") else []
    try:
        code = main(["serve", *model, "--port", "0", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_sampling_defaults_come_from_the_given_source(tmp_path: Path) -> None:
    of_model = {"temperature": 0.6, "top_k": 20, "eos_token_id": 5, "top_p": None}
    assert read_sampling_defaults("auto", of_model) == {"temperature": 0.6, "top_k": 20}
    assert read_sampling_defaults("vllm", of_model) == {}
    (tmp_path / "generation_config.json").write_text('{"min_p": 0.1}')
    assert read_sampling_defaults(str(tmp_path), of_model) == {"min_p": 0.1}


def test_invalid_sampling_defaults_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p must be .*, got 0; "):
        read_sampling_defaults("auto", {"top_p": 0})
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature must be"):
        read_sampling_defaults("auto", {"temperature": "0.6"})
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"cannot read .*generation_config\.json"):
        read_sampling_defaults(str(tmp_path), {})


def test_overrides_replace_sampling_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    command = ["serve", "--override-generation-config", '{"temperature": 0.1, "min_p": 0.2}']
    args = parse([*command, "--generation-config", str(tmp_path)])
    own = {"temperature": 0.1, "min_p": 0.2}
    assert server_options(args, "m", {}).sampling_defaults == {"top_k": 20, **own}
    args = parse([*command, "--generation-config", "vllm"])
    assert server_options(args, "m", {"top_p": 0.5}).sampling_defaults == own
    assert server_options(parse(command), "m", {"top_p": 0.5}).sampling_defaults == {
        "top_p": 0.5,
        **own,
    }
    file = tmp_path / "server.yaml"
    file.write_text("override-generation-config: {temperature: 0.1, min_p: 0.2}\n")
    args = parse(["serve", "--config", str(file)])
    assert server_options(args, "m", {}).sampling_defaults == own


def test_the_built_in_model_has_a_sensible_temperature() -> None:
    """At 1.0, the API's default, a model of this size generates gibberish."""
    built_in = find_checkpoint("smollm2", need_weights=False)
    assert read_sampling_defaults("auto", built_in.generation_config) == {"temperature": 0.3}
    by_path = find_checkpoint(str(built_in.path), need_weights=False)
    assert read_sampling_defaults("auto", by_path.generation_config) == {}


def test_an_empty_key_in_the_environment_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOVLLM_API_KEY", "")
    assert main(["serve", "/no/such/model", "--port", "0"]) == 2
    assert "api_key must be non-empty keys" in capsys.readouterr().err


def test_the_environment_has_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"HOST": "::1", "PORT": "1", "API_KEY": "k", "MODEL": "org/name"}.items():
        monkeypatch.setenv(f"NANOVLLM_{name}", value)
    args = parse(["serve"])
    assert (args.host, args.port, args.api_key) == ("::1", 1, ("k",))
    assert engine_config(args).model == "org/name"
    args = parse(["serve", "other", "--host", "127.0.0.1", "--port", "2", "--api-key", "a", "b"])
    assert (args.host, args.port, args.api_key) == ("127.0.0.1", 2, ["a", "b"])
    assert engine_config(args).model == "other"
    monkeypatch.setenv("NANOVLLM_PORT", "http")
    with pytest.raises(SystemExit):
        parse(["serve"])
    assert "argument --port: invalid int value: 'http'" in capsys.readouterr().err


def test_origins_may_be_a_list_as_in_vllm() -> None:
    for given in (["https://a", "*"], ['["https://a", "*"]']):
        args = parse(["serve", "--allowed-origins", *given])
        assert server_options(args, "m", {}).allowed_origins == ("https://a", "*")


class ServeProcess:
    """The command, running in a child process."""

    def __init__(
        self,
        *arguments: str,
        program: Sequence[str] = ("-m", "nanovllm", "serve"),
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self.verify = verify  # how clients verify the certificate
        command = [sys.executable, *program, *arguments, "--port", "0"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"is at (https?://\S+:\d+) \(API: /v1\)$", line):
                self.url = found.group(1)
                break
        else:
            raise AssertionError("".join(self.lines))

    def stream(self, into: list[str], **body: Any) -> threading.Thread:
        """Read a stream in a thread, line by line."""

        def read() -> None:
            options: dict[str, Any] = {"json": {**body, "stream": True}, "timeout": 240}
            options["verify"] = self.verify
            try:
                with httpx.stream("POST", f"{self.url}/v1/completions", **options) as response:
                    for line in response.iter_lines():
                        into.append(line)
            except httpx.RemoteProtocolError:
                into.append("connection lost")

        thread = threading.Thread(target=read)
        thread.start()
        return thread


PAUSED = """
import sys
from nanovllm.cli import main
from nanovllm.engine.core import EngineCore

step = EngineCore.step

def paused_step(core):
    EngineCore.step = step
    breakpoint()
    return step(core)

EngineCore.step = paused_step
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_breakpoint_under_in_process_reads_the_terminal(tmp_path: Path) -> None:
    model = str(make_byte_file(tmp_path))
    server = ServeProcess(model, *ENGINE, "--in-process", program=["-c", PAUSED])
    process, lines = server.process, []
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        response = server.stream(lines, prompt="x", max_tokens=3, ignore_eos=True)
        process.stdin.write("p 6 * 7, core.has_unfinished\n")
        process.stdin.flush()
        shown = ""
        while "(42, True)" not in shown:
            shown += (character := process.stdout.read(1))
            assert character, shown
        assert httpx.get(f"{server.url}/health", timeout=240).status_code == 200
        assert not any(line.startswith("data: ") for line in lines)
        process.stdin.write("c\n")
        process.stdin.flush()
        response.join()
        assert lines[-2:] == ["data: [DONE]", ""]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=240)
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_signals", "num_engines"), [(2, 1), (1, 2)])
def test_the_first_signal_lets_responses_finish_and_the_second_does_not(
    tmp_path: Path, num_signals: int, num_engines: int
) -> None:
    """The case with two engines also uses HTTPS."""
    verify: ssl.SSLContext | bool = True
    tls: list[str] = []
    if num_engines == 2 and shutil.which("openssl") is not None:
        key, certificate = make_certificate(tmp_path)
        verify = ssl.create_default_context(cafile=str(certificate))
        tls = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    server = ServeProcess(
        *(str(make_byte_file(tmp_path)), *ENGINE, "--trust-remote-code"),
        *("--served-model-name", "tiny", "--shutdown-timeout", "30"),
        *("--data-parallel-size", str(num_engines), *tls),
        verify=verify,
    )
    try:
        assert server.url.startswith("https://127.0.0.1:" if tls else "http://127.0.0.1:")
        assert any("--trust-remote-code has no effect" in line for line in server.lines)
        models = httpx.get(f"{server.url}/v1/models", verify=verify, timeout=240).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        num_tokens = 900 if num_signals == 2 else 200
        streams: dict[threading.Thread, list[str]] = {}
        for prompt in "xyz"[:num_engines]:
            lines: list[str] = []
            body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
            streams[server.stream(lines, **body)] = lines
        while min(map(len, streams.values())) < 5:
            time.sleep(0.01)
            assert all(thread.is_alive() for thread in streams), streams
        for _ in range(num_signals):
            os.kill(server.process.pid, signal.SIGTERM)
            wait_until_refused(server)
        for thread in streams:
            thread.join(240)
        assert server.process.wait(240) == 0
        for lines in streams.values():
            assert "data: [DONE]" in lines
            ends = [line for line in lines if "the server is shutting down" in line]
            assert len(ends) == num_signals - 1
        assert server.process.stderr is not None
        assert not server.process.stderr.read()
    finally:
        server.process.kill()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Create a key and a certificate for 127.0.0.1."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


def wait_until_refused(server: ServeProcess) -> None:
    """Wait until new connections are refused."""
    while True:
        try:
            httpx.get(f"{server.url}/health", timeout=1, verify=server.verify)
        except httpx.ConnectError:
            return
        except httpx.TransportError:  # the server was slow, or shut down during the request
            continue
