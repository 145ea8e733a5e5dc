"""Models from a hub: the real huggingface_hub, in separate processes, with a real server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from benchmarks.models import model_path
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.errors import ConfigError
from tests.checkpoint.hub_server import TOKEN, Files, Hub, run_python, serve
from tests.checkpoint.tiny_gguf import HIDDEN, write_gguf
from tests.checkpoints import TinyCheckpoint

WANTED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}
UNWANTED = {
    "model.safetensors.index.json",
    "README.md",
    "pytorch_model.bin",
    "original/model.safetensors",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "consolidated.safetensors",
    "flax_model.msgpack",
}
FIND = """
import json, sys
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.errors import CheckpointError
for options in json.loads(sys.argv[1]):
    try:
        found = find_checkpoint(**options)
        [suffix] = {file.suffix[1:] for file in found.weight_files} or {"none"}
        answer = [found.path.name, suffix, found.config["hidden_size"]]
    except CheckpointError as error:
        answer = " ".join(str(error).split())
    print(json.dumps(answer))
"""
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
WITHOUT_HUB = [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
GENERATE = """
from nanovllm import LLM, SamplingParams
sizes = dict(kvcache_block_size=16, max_num_seqs=4, max_model_len=64)
with LLM("org/tiny", revision="old", skip_tokenizer_init=True, **sizes) as llm:
    params = SamplingParams(temperature=0, max_tokens=8)
    print(llm.generate([3, 14, 15], params, use_tqdm=False)[0].token_ids)
"""

START = """
import json, sys
from nanovllm import LLM, SamplingParams
from nanovllm.errors import NanovllmError
from nanovllm.worker import torch_device
torch_device.available_memory = torch_device.total_memory = lambda: 8 << 30
for options in json.loads(sys.argv[1]):
    try:
        LLM(**options)
    except NanovllmError as error:
        print(type(error).__name__, " ".join(str(error).split()))
"""


def model(hidden_size: int, names: set[str]) -> Files:
    """A model whose config can be told from others; its other files are never opened."""
    files = {name: f"{name} of {hidden_size}".encode() for name in names}  # no two alike
    files["generation_config.json"] = b"{}"
    files["config.json"] = json.dumps({"hidden_size": hidden_size}).encode()
    return files


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    sharded = model(1, WANTED | UNWANTED)
    only_bin = {"config.json": b'{"hidden_size": 4}', "pytorch_model.bin": b"x"}
    models = {
        "org/name": {"main": sharded, "v2": model(2, WANTED), "refs/pr/1": model(3, WANTED)},
        "org/bin": {"main": only_bin},
        "org/gated": {"main": sharded},
        "org/gguf": {"main": {"q8/a.gguf": write_gguf(tmp_path / "a.gguf").read_bytes()}},
        "Qwen/Qwen3-0.6B": {"main": model(5, WANTED)},
        "HuggingFaceTB/SmolLM2-135M-Instruct": {"main": model(6, WANTED)},
    }
    with serve(Hub(models, gated=("org/gated",))) as running:
        yield running


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Callable[..., list[str]]:
    """Run a script; the cache is empty at first and kept between the runs of one test."""

    def in_process(script: str, *arguments: str, **variables: str) -> list[str]:
        result = run_python(hub, tmp_path / "cache", "-c", script, *arguments, **variables)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return in_process


@pytest.fixture
def find(run: Callable[..., list[str]]) -> Callable[..., list[Any]]:
    """Find some checkpoints in one process: [folder, weight format, hidden size], or the error."""

    def in_process(*calls: dict[str, Any], **variables: str) -> list[Any]:
        return [json.loads(line) for line in run(FIND, json.dumps(calls), **variables)]

    return in_process


@pytest.fixture
def forget(hub: Hub, tmp_path: Path) -> Callable[..., None]:
    """Leave an incomplete cache, like other programs: without the file list and some files."""

    def in_cache(repo_id: str, *names: str) -> None:
        copy = tmp_path / "cache" / "hub" / f"models--{repo_id.replace('/', '--')}"
        shutil.rmtree(copy / "trees", ignore_errors=True)
        for name in names:
            (copy / "snapshots" / hub.commit(repo_id, "main") / name).unlink()

    return in_cache


def test_only_needed_files_are_fetched(hub: Hub, find: Callable[..., list[Any]]) -> None:
    commit = hub.commit("org/name", "main")
    alone = {"model": "org/name", "need_weights": False, "need_tokenizer": False}
    assert find(alone) == [[commit, "none", 1]]
    assert hub.fetched() == ["config.json", "generation_config.json"]
    assert find({"model": "org/name"}) == [[commit, "safetensors", 1]]
    assert hub.fetched() == sorted(WANTED)  # the two files from before are not sent again


def test_embedding_models_are_fetched_with_their_modules(
    hub: Hub, find: Callable[..., list[Any]]
) -> None:
    layers = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    other = {"2_Dense/pytorch_model.bin", "README.md", "sentence_bert_config.json"}
    files = model(1, {*WANTED, *layers, *other})
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [{"path": path, "type": f"models.{kind}"} for path, kind in kinds.items()]
    files["modules.json"] = json.dumps(modules).encode()
    files["1_Pooling/config.json"] = b'{"pooling_mode": "mean"}'
    files["2_Dense/config.json"] = b'{"activation_function": "torch.nn.modules.linear.Identity"}'
    hub.models["org/embedding"] = {"main": files}
    assert find({"model": "org/embedding"})[0][1] == "safetensors"
    assert hub.fetched() == sorted({*WANTED, *layers, "modules.json"})


def test_unsupported_modules_are_not_fetched(hub: Hub, find: Callable[..., list[Any]]) -> None:
    files = {**model(1, WANTED), "1_Pooling/config.json": b'{"pooling_mode": "cls"}'}
    files["modules.json"] = b'[{"path": "1_Pooling", "type": "x.Pooling"}]'
    hub.models["org/embedding"] = {"main": files}
    assert "pooling is not supported" in find({"model": "org/embedding"})[0]
    configs = {"config.json", "generation_config.json", "modules.json", "1_Pooling/config.json"}
    assert hub.fetched() == sorted(configs)


@pytest.mark.slow
def test_what_cannot_run_is_not_fetched(hub: Hub, run: Callable[..., list[str]]) -> None:
    """Unsupported models, and models that this device cannot shard or hold, are not downloaded."""
    config = json.loads(Path(model_path("llama-3.1-8b")).read_text())
    changes: dict[str, dict[str, Any]] = {
        "architecture": {"architectures": ["NewForCausalLM"]},
        "scheme": {"quantization_config": {"quant_method": "mxfp4"}},
        "size": {"num_hidden_layers": "32"},
        "whole": {},
    }
    for name, change in changes.items():
        files = {**model(1, WANTED), "config.json": json.dumps(config | change).encode()}
        hub.models[f"org/{name}"] = {"main": files}
    calls = [{"model": f"org/{name}", "device": "cpu"} for name in changes]
    calls += [{**calls[-1], **option} for option in ({"tensor_parallel_size": 3}, {"dtype": "x"})]
    calls += [{**calls[3], "attention_backend": "triton"}]
    calls += [{"model": "org/gguf/q8/a.gguf", "device": "tpu"}]
    answers = run(START, json.dumps(calls))
    messages = [
        "UnsupportedModelError architecture 'NewForCausalLM'",
        "UnsupportedQuantisationError quantization_config in config.json: quant_method 'mxfp4'",
        "CheckpointError config.json: num_hidden_layers must be a whole number",
        r"ConfigError org/whole in .* does not fit: .*weights (29.92|14.96), .* 8.00 GiB of 8",
        "ConfigError tensor_parallel_size=3 does not divide",
        "ConfigError dtype must be",
        "ConfigError attention_backend='triton' needs a CUDA device",
        "ConfigError device must be",
    ]
    assert len(answers) == len(messages)
    for answer, message in zip(answers, messages, strict=True):
        assert re.match(message, answer), answer
    assert set(hub.fetched()) == {"config.json", "generation_config.json"}


def test_weights_may_be_bin_or_one_gguf_file(hub: Hub, find: Callable[..., list[Any]]) -> None:
    """Errors name the unknown file, revision or model."""
    of_bin, of_gguf, missing, no_config, revision, absent = find(
        {"model": "org/bin"},
        {"model": "org/gguf/q8/a.gguf"},
        {"model": "org/gguf/b.gguf"},
        {"model": "org/gguf"},
        {"model": "org/name", "revision": "v3"},
        {"model": "org/absent"},
    )
    assert of_bin[1:] == ["bin", 4]
    assert of_gguf == ["a.gguf", "gguf", HIDDEN]
    assert re.search("'org/gguf' on the Hugging Face hub.* has no b.gguf", missing)
    assert "has no config.json" in no_config
    assert 'it has GGUF files: q8/a.gguf; pass one as "org/gguf/q8/a.gguf"' in no_config
    assert "'org/name' on the Hugging Face hub has no revision 'v3'" in revision
    assert "'org/absent' is neither a local folder nor a model" in absent
    assert "set HF_TOKEN or run `hf auth login`" in absent
    assert hub.fetched() == ["config.json", "pytorch_model.bin", "q8/a.gguf"]


def test_short_names_are_hub_ids(find: Callable[..., list[Any]]) -> None:
    """A revision selects the hub's model, even if a package contains the model."""
    qwen3, smollm2 = find({"model": "qwen3"}, {"model": "SmolLM2", "revision": "main"})
    assert (qwen3[2], smollm2[2]) == (5, 6)


@pytest.mark.slow
def test_a_complete_copy_serves_without_the_hub(hub: Hub, find: Callable[..., list[Any]]) -> None:
    commits = {name: hub.commit("org/name", name) for name in ("main", "v2", "refs/pr/1")}
    by_name = [{"model": "org/name", "revision": name} for name in (None, "v2")]
    by_commit = {"model": "org/name", "revision": commits["refs/pr/1"]}
    found = find(*by_name, by_commit)
    assert found == [
        [commits["main"], "safetensors", 1],
        [commits["v2"], "safetensors", 2],
        [commits["refs/pr/1"], "safetensors", 3],
    ]
    partial = {"model": "org/bin", "need_weights": False, "need_tokenizer": False}
    find(partial)
    hub.asked.clear()
    absent = {"model": "org/name", "revision": "v3"}
    calls = [*by_name, by_commit, partial, {"model": "org/bin"}, {"model": "org/absent"}, absent]
    for gone in WITHOUT_HUB:
        *again, in_part, no_weights, nothing, other = find(*calls, **gone)
        assert hub.asked == []
        assert again == found
        assert in_part[1:] == ["none", 4]
        for error, wanted in (
            (no_weights, "'org/bin'"),
            (nothing, "'org/absent'"),
            (other, "'org/name at revision v3'"),
        ):
            assert f"{wanted} is neither a local folder nor (completely) in the hub cache" in error
            assert "connect to the network" in error
        assert ("HF_HUB_OFFLINE" in nothing) == ("HF_HUB_OFFLINE" in gone)


@pytest.mark.slow
def test_a_partial_copy_names_what_it_lacks(
    hub: Hub, find: Callable[..., list[Any]], forget: Callable[..., None]
) -> None:
    lost: dict[str, tuple[set[str], str]] = {
        "org/no-config": ({"config.json"}, "has no config.json"),
        "org/no-weights": (set(SHARDS), "has no weights"),
        "org/some-shards": ({SHARDS[1]}, f"has {SHARDS[0]}: some are missing"),
    }
    hub.models |= {repo_id: {"main": model(7, WANTED)} for repo_id in lost}
    calls = [{"model": repo_id} for repo_id in lost]
    found = find(*calls)
    for repo_id, (names, _) in lost.items():
        forget(repo_id, *names)
    hub.asked.clear()
    for gone in WITHOUT_HUB:
        errors = find(*calls, **gone)
        assert hub.asked == []
        for error, (_, message) in zip(errors, lost.values(), strict=True):
            assert message in error
    assert find(*calls) == found


@pytest.mark.slow
def test_a_gguf_file_that_is_not_cached(
    find: Callable[..., list[Any]], forget: Callable[..., None]
) -> None:
    find({"model": "org/gguf/q8/a.gguf"})
    forget("org/gguf")
    calls = [{"model": f"org/gguf{file}"} for file in ("/q8/a.gguf", "/b.gguf", "")]
    for gone in WITHOUT_HUB:
        found, other, whole = find(*calls, **gone)
        assert found == ["a.gguf", "gguf", HIDDEN]
        for error, missing in ((other, "has no b.gguf"), (whole, "has no config.json")):
            assert "in its cache if the hub cannot be reached" in error
            assert missing in error


@pytest.mark.slow
def test_a_complete_copy_needs_no_list_of_files(
    hub: Hub, find: Callable[..., list[Any]], forget: Callable[..., None]
) -> None:
    calls = [{"model": "org/name"}]
    found = find(*calls)
    forget("org/name")
    for gone in WITHOUT_HUB:
        assert find(*calls, **gone) == found


@pytest.mark.slow
def test_part_of_a_model_that_is_gone_from_the_hub(
    hub: Hub, find: Callable[..., list[Any]], forget: Callable[..., None]
) -> None:
    """The error lists the existing files and reports missing ones, not a missing network."""
    find({"model": "org/name"})
    forget("org/name", SHARDS[0])
    del hub.models["org/name"]
    [error] = find({"model": "org/name"})
    assert f"has {SHARDS[1]}: some are missing" in error


@pytest.mark.slow
def test_a_gated_model_needs_the_token(hub: Hub, find: Callable[..., list[Any]]) -> None:
    [error] = find({"model": "org/gated"})
    assert "set HF_TOKEN or run `hf auth login`" in error
    [refused] = find({"model": "org/gated"}, HF_TOKEN="hf_wrong")
    assert refused == error
    assert hub.fetched() == []
    [found] = find({"model": "org/gated"}, HF_TOKEN=TOKEN)
    assert found[1:] == ["safetensors", 1]


@pytest.mark.slow
def test_revisions_are_other_weights(
    hub: Hub,
    run: Callable[..., list[str]],
    find: Callable[..., list[Any]],
    tiny: Callable[[str], TinyCheckpoint],
) -> None:
    """With both revisions in the cache and no hub, the requested one is used."""
    variants = {"main": tiny("qwen3"), "old": tiny("llama")}
    hub.models["org/tiny"] = {
        revision: {file.name: file.read_bytes() for file in checkpoint.path.iterdir()}
        for revision, checkpoint in variants.items()
    }
    find({"model": "org/tiny", "revision": "old"}, {"model": "org/tiny"})
    [tokens] = run(GENERATE, HF_HUB_OFFLINE="1")
    assert tokens == str(variants["old"].generate([3, 14, 15], 8))


def test_a_local_path_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"revision='main' .* {tmp_path} is a local path"):
        find_checkpoint(str(tmp_path), revision="main")
    for revision in ("", 3):
        with pytest.raises(ConfigError, match=r"revision must be .* got"):
            LLM("org/name", revision=revision)


def test_code_from_a_hub_is_never_run(
    tiny: Callable[[str], TinyCheckpoint], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("qwen3").path, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise AssertionError")
    with LLM(folder, trust_remote_code=True, skip_tokenizer_init=True, device="cpu") as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert "trust_remote_code has no effect: code from a repository is never run" in caplog.text
