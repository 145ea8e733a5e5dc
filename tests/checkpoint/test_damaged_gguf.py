"""GGUF files damaged on purpose and at random: each raises a typed error, quickly."""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from nanovllm.checkpoint.gguf_file import open_gguf
from nanovllm.errors import CheckpointError
from tests.checkpoint import tiny_gguf
from tests.checkpoint.damage import VOCABULARIES, load, outcome, write_gguf_files
from tests.checkpoint.tiny_gguf import HEAD_DIM, HEADS, VOCAB, hf_tensors, write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_gguf_files(tmp_path_factory.mktemp("gguf"))


def damage(rng: random.Random, data: bytearray, header_size: int) -> None:
    """Change or remove some bytes of a header, or cut the file."""
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
        return
    extremes = [0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 32, 2**64 - 1]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(4, header_size)
        kind = rng.random()
        if kind < 0.6:
            data[at] = rng.randrange(256)
        elif kind < 0.8:
            data[at : at + 8] = struct.pack("<Q", rng.choice(extremes))
        elif kind < 0.9:
            data[at : at + 4] = struct.pack("<I", rng.choice(extremes[:4]))
        else:
            del data[at : at + rng.randrange(1, 9)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from damaged weights
def test_random_gguf_files(gguf_files: list[Path], tmp_path: Path) -> None:
    rng, outcomes = random.Random(0), Counter[str]()
    for path in gguf_files:
        load(path, has_tokenizer=True)
    wholes = [(path.read_bytes(), open_gguf(path).data_offset) for path in gguf_files]
    for _ in range(120):
        whole, header_size = rng.choice(wholes)
        data = bytearray(whole)
        damage(rng, data, header_size)
        (tmp_path / "m.gguf").write_bytes(data)
        with outcome(outcomes):
            load(tmp_path / "m.gguf", has_tokenizer=True)
    assert outcomes["CheckpointError"] > 60


KEYS = """block_count embedding_length attention.head_count attention.head_count_kv
    attention.key_length attention.layer_norm_rms_epsilon rope.freq_base context_length"""


class Wide(int):
    """An integer that is written in 64 bits."""


@pytest.mark.parametrize("key", [*KEYS.split(), "expert_count", "attention.sliding_window"])
def test_odd_gguf_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    def add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
        if isinstance(value, Wide):
            writer.add_uint64(name, value)
        else:
            tiny_gguf_add(writer, name, value)

    tiny_gguf_add = tiny_gguf.add_value
    monkeypatch.setattr(tiny_gguf, "add_value", add)
    arch = {"expert_count": "qwen3moe", "attention.sliding_window": "gemma3"}.get(key, "llama")
    outcomes = Counter[str]()
    odd = [Wide(2**64 - 1), Wide(4 * 10**8), float("nan"), float("inf"), -1.0, "x", [1, 2], ["a"]]
    for value in odd:
        metadata = {f"{arch}.{key}": value, f"{arch}.attention.value_length": None}
        path = write_gguf(tmp_path / "m.gguf", arch, metadata=metadata)
        with outcome(outcomes):
            load(path)
    may_be_large = ("context_length", "rope.freq_base", "attention.sliding_window")
    is_number = key in ("attention.layer_norm_rms_epsilon", "rope.freq_base")  # of any value
    assert is_number or outcomes["loaded"] == (key in may_be_large)


def test_no_heads_in_gguf(tmp_path: Path) -> None:
    lengths = ("llama.attention.key_length", "llama.attention.value_length")
    none = {"llama.attention.head_count": 0, **dict.fromkeys(lengths)}
    with pytest.raises(CheckpointError, match=r"num_attention_heads must be .* got 0"):
        load(write_gguf(tmp_path / "m.gguf", metadata=none))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", ["llama"]),
        ("split.count", "2"),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.tokens", [1] * VOCAB),
        ("tokenizer.ggml.scores", ["a"] * VOCAB),
        ("tokenizer.ggml.scores", [1.0]),
        ("tokenizer.ggml.token_type", [1.5] * VOCAB),
        ("tokenizer.ggml.model", 3),
        ("tokenizer.ggml.model", ["llama"]),
        ("tokenizer.ggml.bos_token_id", "1"),
        ("tokenizer.ggml.bos_token_id", VOCAB),
        ("tokenizer.ggml.eos_token_id", [2]),
        ("tokenizer.ggml.eot_token_id", 0.5),
        ("tokenizer.ggml.add_bos_token", "yes"),
        ("tokenizer.chat_template", 3),
        ("llama.rope.scaling.type", ["yarn"]),
    ],
)
def test_odd_gguf_types(tmp_path: Path, key: str, value: object) -> None:
    metadata = {**VOCABULARIES["llama"], key: value}
    with pytest.raises(CheckpointError):
        load(write_gguf(tmp_path / "m.gguf", metadata=metadata), has_tokenizer=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"<unk>", b"\xff\xfe\xfd\xfc\xfb"),
        (b"gpt2", b"\xff\xff\xff\xff"),
        (b"qwen3moe.block_count", b"qwen3moe.block_\xff\xff\xff\xff\xff"),
        (b"token_embd.weight", b"token_embd.weigh\xff"),
    ],
)
def test_gguf_text_that_is_not_utf8(
    gguf_files: list[Path], tmp_path: Path, old: bytes, new: bytes
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_files[1].read_bytes().replace(old, new))
    with pytest.raises(CheckpointError):
        load(path, has_tokenizer=True)


@pytest.mark.parametrize("offset", [2**64 - 32, 2**64 - 64, 2**63, 2**40])
def test_gguf_offsets_outside_the_data(tmp_path: Path, offset: int) -> None:
    """Some offsets wrap around to the header when they are added."""
    path = write_gguf(tmp_path / "m.gguf")
    tensor = open_gguf(path).tensors[-1].field
    data = bytearray(path.read_bytes())
    at = tensor.offset + sum(part.nbytes for part in tensor.parts[:5])
    data[at : at + 8] = struct.pack("<Q", offset)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        load(path)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("token_embd.weight", np.ones(VOCAB, np.float32)),
        ("rope_freqs.weight", np.ones(HEAD_DIM, np.float32)),
        ("rope_freqs.weight", np.ones((4, HEADS), np.float32)),
        ("rope_freqs.weight", np.ones(HEAD_DIM // 2, np.int8)),
        ("rope_freqs.weight", np.zeros(HEAD_DIM // 2, np.float32)),
        ("blk.0.attn_q.weight", np.ones((3, 3, 3), np.float32)),
        ("weight", np.ones(3, np.float32)),
    ],
)
def test_odd_gguf_tensors(tmp_path: Path, name: str, array: np.ndarray) -> None:
    hf_names = {"token_embd.weight": "model.embed_tokens", "blk.0.attn_q.weight": "layers.0.*q_pro"}
    tensors = hf_tensors("llama", tied=True)
    replaced = hf_names.get(name, "-").split("*")
    kept = {key: value for key, value in tensors.items() if not all(p in key for p in replaced)}
    with pytest.raises(CheckpointError):
        load(write_gguf(tmp_path / "m.gguf", tensors=kept, raw={name: array}))
