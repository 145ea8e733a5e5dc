"""Checkpoints damaged on purpose and at random: each raises a typed error, quickly."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("gguf")


from nanovllm.checkpoint.find import Checkpoint, find_checkpoint
from nanovllm.checkpoint.list_tensors import list_tensors
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import EngineConfig
from nanovllm.errors import CheckpointError
from nanovllm.models.registry import read_config
from nanovllm.worker.check_model import check_model
from tests.checkpoint.damage import ODD, load, outcome, write_gguf_files
from tests.checkpoints import TinyCheckpoint
from tests.devices import cpu_device
from tests.models.test_configs import CONFIGS, saved

pytestmark = pytest.mark.usefixtures("one_thread")
ROPE_KEYS = ["factor", "beta_fast", "beta_slow", "mscale", "attention_factor", "rope_theta"]
ROPE_KEYS += ["original_max_position_embeddings", "low_freq_factor", "rope_type", "truncate"]


def odd_config(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(json.dumps(config))
    for _ in range(rng.choice([1, 1, 2, 3])):
        ropes = [value for value in config.values() if isinstance(value, dict)]
        if ropes and rng.random() < 0.3:
            rng.choice(ropes)[rng.choice(ROPE_KEYS)] = deepcopy(rng.choice(ODD))
        else:
            config[rng.choice(list(config))] = deepcopy(rng.choice(ODD))
    return config


def test_random_configs() -> None:
    rng, outcomes = random.Random(0), Counter[str]()
    configs = [saved(name) for name in CONFIGS]
    engine = EngineConfig("odd", max_model_len=64, max_num_seqs=4, dtype="float32", device="cpu")
    for _ in range(400):
        with outcome(outcomes):
            check_model(engine, cpu_device(), odd_config(rng, rng.choice(configs)))
    assert outcomes["CheckpointError"] > 150
    assert outcomes["loaded"] > 30


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "null", '{"a": 1e999}', "", "\0", '{"architectures": NaN}'],
    ids=["lists", "objects", "null", "infinite", "empty", "binary", "nan"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_odd_json(
    tiny: Callable[[str], TinyCheckpoint], tmp_path: Path, name: str, text: str
) -> None:
    folder = shutil.copytree(tiny("llama").path, tmp_path / "m")
    (folder / name).write_text(text)
    is_needed = name == "tokenizer.json"
    outcomes = Counter[str]()
    with outcome(outcomes):
        load(folder, has_tokenizer=is_needed)
    has_no_content = name == "generation_config.json" and text.endswith("}")
    assert outcomes == Counter(["loaded" if has_no_content else "CheckpointError"])


def test_objects_within_objects_without_end() -> None:
    config = saved("llama")
    for key in ("rope_parameters", "quantization_config", "architectures", "head_dim"):
        inner: Any = 1
        for _ in range(5000):
            inner = {"rope_scaling": inner}
        with pytest.raises(CheckpointError):
            read_config({**config, key: inner})


def test_random_safetensors_headers(tiny: Callable[[str], TinyCheckpoint], tmp_path: Path) -> None:
    rng, outcomes = random.Random(0), Counter[str]()
    folder = shutil.copytree(tiny("llama").path, tmp_path / "m")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    (size,) = struct.unpack_from("<Q", whole)
    header, body = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    odd = [*ODD, "F32", "I8", "F8_E4M3", [0, 0], [4, 0], [0, 2**62], [-4, 4], [2**40, 2**40]]
    for _ in range(60):
        changed, length = json.loads(json.dumps(header)), None
        entry = changed[rng.choice([name for name in header if name != "__metadata__"])]
        entry[rng.choice(list(entry))] = deepcopy(rng.choice(odd))
        text = json.dumps(changed if rng.random() < 0.8 else header).encode()
        if rng.random() < 0.2:
            length = rng.choice([0, 1, size - 1, size + 9, 2**31, 2**63, 2**64 - 1])
        start = struct.pack("<Q", len(text) if length is None else length)
        file.write_bytes(start + text + body[: len(body) - rng.choice([0, 0, 0, 4])])
        with outcome(outcomes):
            load(folder)
    assert outcomes["CheckpointError"] > 30


NORM = "model.norm.weight"


@pytest.mark.parametrize("is_zip", [True, False])
def test_odd_bin_files(tiny: Callable[[str], TinyCheckpoint], tmp_path: Path, is_zip: bool) -> None:
    checkpoint = tiny("llama")
    shutil.copy(checkpoint.path / "config.json", tmp_path)
    file = tmp_path / "pytorch_model.bin"
    tensors = dict(load_file(checkpoint.path / "model.safetensors"))
    norm = tensors[NORM]
    odd: list[Any] = [{1: norm}, {(1, 2): norm}, [norm], norm, 3, None, {"state_dict": tensors}]
    values = [norm.to_sparse(), norm.to("meta"), None, 3, norm.int(), norm[0], norm[:0]]
    odd += [{**tensors, NORM: value} for value in [*values, norm.expand(3, -1)]]
    for content in odd:
        torch.save(content, file, _use_new_zipfile_serialization=is_zip)
        with pytest.raises(CheckpointError):
            load(tmp_path)
    torch.save(tensors, file, _use_new_zipfile_serialization=is_zip)
    load(tmp_path)
    whole, rng, outcomes = file.read_bytes(), random.Random(0), Counter[str]()
    for _ in range(20):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 3, 9])):
            at = rng.randrange(3000)
            data[at if rng.random() < 0.7 else at - 3000] = rng.randrange(256)
        file.write_bytes(data)
        with outcome(outcomes):
            load(tmp_path)
    assert outcomes["CheckpointError"] > 10


@pytest.mark.parametrize("content", [{"a": 1}, 10**50, [[]] * 9, "x"])
def test_other_pickles(
    tiny: Callable[[str], TinyCheckpoint], tmp_path: Path, content: object
) -> None:
    shutil.copy(tiny("llama").path / "config.json", tmp_path)
    for data in (pickle.dumps(content, 2), b"", b"\x80", b"PK\3\4", b"(" * 5000 + b"."):
        (tmp_path / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(CheckpointError):
            list_tensors(find_checkpoint(str(tmp_path)))


def test_compressed_bin_files_are_not_inflated(
    tiny: Callable[[str], TinyCheckpoint], tmp_path: Path
) -> None:
    shutil.copy(tiny("llama").path / "config.json", tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save({NORM: torch.zeros(3)}, tmp_path / "stored")
    with (
        zipfile.ZipFile(tmp_path / "stored") as stored,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    checkpoint = find_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="its members are compressed"):
        list_tensors(checkpoint)
    file.write_bytes(b"PK\3\4" + file.read_bytes()[4:-30])  # torch goes by the first bytes
    with pytest.raises(CheckpointError, match=r"\(BadZipFile\): it is damaged"):
        list_tensors(checkpoint)


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickles_of_code_are_refused_without_advice_to_run_it(
    tiny: Callable[[str], TinyCheckpoint], tmp_path: Path, is_zip: bool
) -> None:
    shutil.copy(tiny("llama").path / "config.json", tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save({NORM: os.system}, file, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match="holds more than tensors") as caught:
        list_tensors(find_checkpoint(str(tmp_path)))
    assert "weights_only" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer_config.json", "pytorch_model.bin", "m.gguf"],
)
def test_pipes_are_refused_instead_of_read(
    tiny: Callable[[str], TinyCheckpoint], tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(tiny("llama").path, tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for path in (folder, folder / name):
        with pytest.raises(CheckpointError, match=f"{name} is a pipe, socket or device"):
            find_checkpoint(str(path))


def odd_place(rng: random.Random, tree: Any) -> None:
    """Put an odd value anywhere into a JSON tree."""
    places, nodes = [], [tree]
    while nodes:
        node = nodes.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        places += [(node, key) for key in keys]
        nodes += [node[key] for key in keys if isinstance(node[key], dict | list)]
    node, key = rng.choice(places)
    node[key] = deepcopy(rng.choice(ODD))


def test_random_tokenizers(tmp_path: Path) -> None:
    gguf_files = write_gguf_files(tmp_path / "gguf")
    rng, outcomes = random.Random(0), Counter[str]()
    for path in gguf_files:
        load_tokenizer(find_checkpoint(str(path))).save_pretrained(tmp_path / path.stem)
    for _ in range(80):
        folder = shutil.copytree(tmp_path / rng.choice(gguf_files).stem, tmp_path / "m")
        file = folder / rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
        tree = json.loads(file.read_text())
        odd_place(rng, rng.choice([tree, *(v for v in tree.values() if isinstance(v, dict) and v)]))
        file.write_text(json.dumps(tree))
        with outcome(outcomes):
            load_tokenizer(Checkpoint(folder, {}, {}, ()))
        shutil.rmtree(folder)
    assert outcomes["CheckpointError"] > 40


@pytest.mark.parametrize("ids", [True, [True], {"a": 1}, [None], "2", 1.5, [[2]]])
def test_odd_generation_configs(
    tiny: Callable[[str], TinyCheckpoint], tmp_path: Path, ids: object
) -> None:
    folder = shutil.copytree(tiny("llama").path, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match="eos_token_id must be an integer or a list"):
        load(folder)
