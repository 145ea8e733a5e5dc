"""Replicas on one machine use separate GPUs, or shares of the CPU threads."""

from __future__ import annotations

import os

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.devices import replica_share
from nanovllm.devices.replica_share import take_share
from nanovllm.errors import ConfigError


def num_visible() -> int:
    """Return the number of visible GPUs of a machine with four."""
    names = os.environ["CUDA_VISIBLE_DEVICES"]
    return len(names.split(",")) if names else 4


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_share, "num_devices", num_visible)
    monkeypatch.setattr(replica_share, "is_cuda", lambda device: device != "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def share_of(replica: int, visible: str = "", **options: int | str) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    take_share(EngineConfig("model", **options), replica)  # type: ignore[arg-type]
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.usefixtures("gpus")
def test_each_engine_sees_the_next_gpus() -> None:
    assert [share_of(i, data_parallel_size=3) for i in range(3)] == ["0", "1", "2"]
    assert [share_of(i, data_parallel_size=2, tensor_parallel_size=2) for i in range(2)] == [
        "0,1",
        "2,3",
    ]
    assert share_of(1, "7,GPU-5,3,1", data_parallel_size=2, tensor_parallel_size=2) == "3,1"
    assert share_of(0, "7,3,1,0") == "7,3,1,0"  # alone: nothing changes


@pytest.mark.usefixtures("gpus")
def test_too_few_gpus_are_refused_by_every_engine() -> None:
    for replica in range(3):
        with pytest.raises(ConfigError, match=r"=3 needs 6 CUDA devices \(2 per .* 4 are visible"):
            share_of(replica, data_parallel_size=3, tensor_parallel_size=2)


@pytest.mark.usefixtures("gpus")
def test_gpus_that_cannot_be_hidden_are_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_share, "num_devices", lambda: 4)
    with pytest.raises(ConfigError, match="cannot be hidden"):
        share_of(0, data_parallel_size=2)


@pytest.mark.usefixtures("gpus")
def test_engines_on_a_cpu_share_its_threads() -> None:
    num_threads = torch.get_num_threads()
    try:
        for given, left in ((8, 4), (5, 2), (1, 1)):
            torch.set_num_threads(given)
            assert share_of(1, "0,1", device="cpu", data_parallel_size=2) == "0,1"
            assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(num_threads)
