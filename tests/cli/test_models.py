"""`nanovllm models`: download, list and remove models in Hugging Face's cache, by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from nanovllm.checkpoint.hub import ALIASES, format_size, quantization_of
from nanovllm.cli import main
from tests.checkpoint.hub_server import Hub, environment_without_hub, serve, settings
from tests.checkpoint.tiny_gguf import write_gguf
from tests.checkpoints import TinyCheckpoint
from tests.cli.terminal_process import ROOT

Result = tuple[int, str, str]  # exit code, stdout and stderr
Cli = Callable[..., list[Result]]
# Every run is a fork of this process, which has imported torch, but nothing that reads the
# environment of a run.
RUN = """
import contextlib, io, json, os, sys, traceback
import nanovllm.models.registry
from nanovllm.cli import main

def run(command):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(err):
        code = main(command.split())
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
    err.truncate(err.seek(0))

for line in sys.stdin:
    variables, *commands = json.loads(line)
    if os.fork() == 0:
        os.environ.update(variables)
        err = io.StringIO()
        try:
            for command in commands:
                run(command)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.wait()
    print(flush=True)
"""
SHARDS = [f"BF16/a-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tiny: Callable[[str], TinyCheckpoint], tmp_path: Path) -> Iterator[Hub]:
    """Three models: one in safetensors, one that is not supported, and GGUF files."""
    gguf = write_gguf(tmp_path / "a.gguf").read_bytes()
    files = {file.name: file.read_bytes() for file in tiny("qwen3").path.iterdir()}
    new = {**json.loads(files["config.json"]), "quantization_config": {"quant_method": "new"}}
    names = ("a-Q4_K_M.gguf", "a.q8_0.gguf", *SHARDS, "mmproj-a-F16.gguf", "other.gguf")
    models = {
        "org/name": files,
        "org/new": {**files, "config.json": json.dumps(new).encode()},
        "org/GGUF": {name: gguf + name.encode() for name in names},
        "Qwen/Qwen3-0.6B": files,
    }
    with serve(Hub({name: {"main": each} for name, each in models.items()})) as running:
        yield running


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_without_hub(),
        cwd=ROOT,
    ) as process:
        yield process


@pytest.fixture
def cli(hub: Hub, forks: subprocess.Popen[str], tmp_path: Path) -> Cli:
    """Run commands in one process that shows no progress bars."""

    def run(*commands: str, **variables: str) -> list[Result]:
        variables = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables}
        own = settings(hub, tmp_path / "cache")
        print(json.dumps([{**own, **variables}, *commands]), file=forks.stdin, flush=True)
        lines = iter(forks.stdout.readline, "\n")  # type: ignore[union-attr]
        results: list[Result] = [tuple(json.loads(line)) for line in lines]
        assert len(results) == len(commands)
        return results

    return run


def models_in(listing: Result) -> list[str]:
    return [json.loads(line)["model"] for line in listing[1].splitlines()]


def test_a_model_from_pull_to_rm(hub: Hub, cli: Cli) -> None:
    files = hub.models["org/name"]["main"]
    names = files.keys() & {"config.json", "generation_config.json", WEIGHTS}
    size = format_size(total := sum(len(files[name]) for name in names))
    weights = format_size(len(files[WEIGHTS]))
    message = f"WARNING: Downloading org/name from the Hugging Face hub: 1 file, {weights}\n"

    pull = "models pull org/name"
    empty, first, second = cli("models list", pull, pull)
    assert empty == (0, "MODEL  SIZE  LAST USED\n", "")
    assert (first[0], first[2]) == (0, message)
    assert Path(first[1].rstrip("\n"), WEIGHTS).is_file()
    assert second == (0, first[1], "")
    assert hub.fetched() == sorted(names)
    hub.asked.clear()

    commands = [pull, "models list", "models list --json", *["models rm org/name"] * 2]
    offline, table, records, removed, absent = cli(*commands, HF_HUB_OFFLINE="1")
    assert offline == second
    assert table[1].splitlines()[1].split()[:3] == ["org/name", *size.split()]
    record = json.loads(records[1])
    assert (record["model"], record["num_bytes"]) == ("org/name", total)
    assert record["last_used"] == pytest.approx(time.time(), abs=600)
    assert removed == (0, f"removed org/name, {size}\n", "")
    assert absent[0] == 1
    assert "'org/name' is not in the hub cache; `nanovllm models list`" in absent[2]
    assert hub.asked == []


def test_quantizations_of_a_repository(hub: Hub, cli: Cli) -> None:
    """A tag names one GGUF file, in any case; the error for another tag lists those that exist."""
    listed = "BF16, Q4_K_M, Q8_0, other.gguf"
    errors = {
        "org/GGUF:Q3_K_S": f"'org/GGUF' has no GGUF file for 'Q3_K_S'; it has {listed}",
        "org/GGUF": f"has no config.json; it has GGUF files: {listed}; pass one as",
        "org/GGUF:bf16": "'org/GGUF:bf16' is split into 2 files; choose another",
        "org/name:Q4_0": "'org/name' has no GGUF file for 'Q4_0'; it has none",
    }
    for (code, _, error), message in zip(
        cli(*(f"models pull {name}" for name in errors)), errors.values(), strict=True
    ):
        assert code == 1
        assert message in error
    assert hub.fetched() == []

    files = {"q4_k_m": "a-Q4_K_M.gguf", "Q8_0": "a.q8_0.gguf"}
    pulls = [*(f"models pull org/GGUF:{tag}" for tag in files), "models pull org/GGUF/other.gguf"]
    *tagged, _, listing = done = cli(*pulls, "models list --json")
    for result, file in zip(tagged, files.values(), strict=True):
        assert Path(result[1].rstrip("\n")).name == file
        assert f"Downloading org/GGUF/{file} from the Hugging Face hub: 1 file" in result[2]
    assert models_in(listing) == ["org/GGUF/other.gguf", "org/GGUF:Q4_K_M", "org/GGUF:Q8_0"]

    remove = "models rm org/GGUF:q4_k_m"
    commands = [*pulls, f"{remove} org/GGUF/other.gguf", "models list --json", remove, pulls[0]]
    *offline, _, listing, absent, again = cli(*commands, HF_HUB_OFFLINE="1")
    assert [result[1] for result in offline] == [result[1] for result in done[:3]]
    assert models_in(listing) == ["org/GGUF:Q8_0"]
    assert "'org/GGUF:Q4_K_M' is not in the hub cache" in absent[2]
    assert again[0] == 1
    assert "Downloading" not in again[2]  # offline, no download is announced


def test_names_of_files_with_one_quantization(hub: Hub, cli: Cli) -> None:
    """The listed names load, each removes only its own file, and a path selects a file as well."""
    files = ["a-Q4_K_M.gguf", "a-Q8_0.gguf", "b-Q4_K_M.gguf", "c-F16.gguf", "mmproj-F16.gguf"]
    paths = [f"org/many/{file}" for file in files]
    gguf = hub.models["org/GGUF"]["main"]["other.gguf"]
    hub.models["org/many"] = {"main": {file: gguf + file.encode() for file in files}}
    *pulled, listing = cli(*(f"models pull {path}" for path in paths[:4]), "models list --json")
    assert [code for code, *_ in pulled] == [0] * 4
    by_path = [paths[0], paths[2]]
    assert models_in(listing) == [*by_path, "org/many:F16", "org/many:Q8_0"]

    [snapshot] = {Path(result[1].rstrip("\n")).parent for result in pulled}
    (snapshot / files[4]).write_bytes(b"x" * 7)  # downloaded by another program
    results = cli(
        "models rm org/many:Q4_K_M",
        *(f"models rm {name}" for name in ("org/many:F16", paths[1], paths[0])),
        "models list --json",
        HF_HUB_OFFLINE="1",
    )
    assert "'org/many:Q4_K_M' is not in the hub cache" in results[0][2]
    assert [code for code, *_ in results] == [1, 0, 0, 0, 0]
    assert models_in(results[-1]) == ["org/many", paths[2]]
    assert (snapshot / files[4]).exists()


def test_short_names_and_models_without_an_organization(hub: Hub, cli: Cli, tmp_path: Path) -> None:
    """What cannot run is refused before its weights are fetched. A listed name comes before a
    short name, and a folder is not a model in the cache."""
    refused, pulled = cli("models pull org/new", "models pull Qwen3")
    assert refused[0] != 0
    assert "quant_method 'new'" in refused[2]
    assert pulled[0] == 0
    assert not any("org/new" in line and WEIGHTS in line for line in hub.asked)
    copies = tmp_path / "cache" / "hub"
    for name in ("gpt2", "qwen3"):
        shutil.copytree(copies / "models--Qwen--Qwen3-0.6B", copies / f"models--{name}")
    names = ["gpt2", "qwen3", "qwen3", str(tmp_path)]
    results = cli(*(f"models rm {name}" for name in names))
    removed = [text.split(",")[0] for _, text, _ in results]
    assert removed == ["removed gpt2", "removed qwen3", "removed Qwen/Qwen3-0.6B", ""]
    assert f"'{tmp_path}' is not in the hub cache" in results[-1][2]


@pytest.mark.parametrize("command", ["pull", "rm"])
def test_json_is_only_for_lists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "--json", command, "org/absent"])
    assert "--json is only for `nanovllm models`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "quantization"),
    {
        "Qwen3-0.6B-Q4_K_M.gguf": "Q4_K_M",
        "qwen2.5-0.5b-instruct-q4_k_m.gguf": "Q4_K_M",
        "llama-2-7b.Q5_0.gguf": "Q5_0",
        "ggml-model-q4_0.gguf": "Q4_0",
        "Qwen3-8B-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
        "BF16/Qwen3-32B-BF16-00001-of-00002.gguf": "BF16",
        "IQ4_XS/gemma-3-27b-it-IQ4_XS.gguf": "IQ4_XS",
        "gpt-oss-20b-mxfp4.gguf": "MXFP4",
        "Phi-3-mini-4k-instruct-fp16.gguf": "FP16",
        "Qwen3-0.6B.gguf": None,
    }.items(),
)
def test_names_of_gguf_files(file: str, quantization: str | None) -> None:
    assert quantization_of(file) == quantization


def test_sizes_have_three_digits() -> None:
    sizes = {0: "0 bytes", 999: "999 bytes", 1520: "1.52 kB", 999_600: "1 MB", 16.06e9: "16.1 GB"}
    assert [format_size(int(size)) for size in sizes] == list(sizes.values())


def test_the_documented_short_names_are_all() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    rows = {line for line in text.splitlines() if line.startswith("| `")}
    for name, each in ALIASES.items():
        assert f"| `{name}` | {each.hub_id} | {each.license} |" in rows
