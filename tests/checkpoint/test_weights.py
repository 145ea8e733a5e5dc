"""Stored tensors: their pieces form the whole tensor, for any format, dtype and offset."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.checkpoint import stored_tensors as weights
from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.list_tensors import list_tensors
from nanovllm.errors import CheckpointError, UnsupportedModelError

TENSORS = {
    "double": torch.randn(5, 3, dtype=torch.float64),
    "wide": torch.randn(7, 300),
    "half": torch.randn(33, 8).half(),
    "narrow": torch.randn(64, 5, 3).bfloat16(),
    "vector": torch.randn(1000).bfloat16(),
}


def list_file(path: Path, tensors: dict[str, Tensor] = TENSORS) -> list[weights.StoredTensor]:
    save = save_file if path.suffix == ".safetensors" else torch.save
    save(tensors, path)  # type: ignore[operator]
    return list_tensors(checkpoint(path))


def checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(path.parent, {}, {}, (path,))


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin"])
@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_pieces_make_up_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
    stored = {tensor.name: tensor for tensor in list_file(tmp_path / name)}
    assert stored.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert (stored[key].shape, stored[key].file) == (tuple(tensor.shape), tmp_path / name)
        for _ in range(2):  # released pages can be read again
            pieces = [rows.clone() for rows in stored[key].read()]
            assert torch.equal(torch.cat(pieces), tensor)
            assert pieces[0].dtype == tensor.dtype
            assert all(rows.nbytes <= piece_bytes or len(rows) == 1 for rows in pieces)


INDICES: list[weights.Index] = [
    (slice(2, 5),),
    (slice(None), slice(1, 3)),
    (slice(1, 4), slice(2, 3)),
    (slice(4, 4),),
]


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin"])
@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("index", INDICES)
def test_pieces_make_up_a_part(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    piece_bytes: int,
    index: weights.Index,
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
    for stored in list_file(tmp_path / name):
        part = TENSORS[stored.name][index[: len(stored.shape)]]
        for _ in range(2):
            pieces = [rows.clone() for rows in stored.read(index[: len(stored.shape)])]
            assert torch.equal(torch.cat([part[:0], *pieces]), part)


@pytest.mark.parametrize("padding", range(4))
def test_a_header_of_any_length(tmp_path: Path, padding: int) -> None:
    """Old files do not pad their header, so that the data begins at an odd address."""
    tensor = torch.randn(9, 5).bfloat16()
    entry = {"dtype": "BF16", "shape": [9, 5], "data_offsets": [0, tensor.nbytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode() + b" " * padding
    data = tensor.view(torch.int16).numpy().tobytes()
    file = tmp_path / "m.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    [stored] = list_tensors(checkpoint(file))
    assert torch.equal(torch.cat(list(stored.read())), tensor)


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    tensors = {**TENSORS, "quantized": torch.ones(4, 4).to(dtype)}
    with pytest.raises(UnsupportedModelError, match=f"{name}: tensor 'quantized' is stored as"):
        list_file(tmp_path / name, tensors)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.safetensors"):
        list_tensors(checkpoint(tmp_path / "gone.safetensors"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_not_said_to_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.chmod(0)
    with pytest.raises(CheckpointError, match="Permission denied"):
        list(list_tensors(checkpoint(path)))
