"""Each tensor-parallel rank has a GPU of its own, or an error says that there are too few."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanovllm.config import EngineConfig
from nanovllm.devices import choose, ranks
from nanovllm.errors import ConfigError


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_cuda", lambda: True)
    monkeypatch.setattr(ranks, "num_devices", lambda: 2)
    monkeypatch.setattr(ranks, "check_c_compiler", lambda: None)
    for device in ("auto", "cuda"):
        config = EngineConfig("none", device=device, tensor_parallel_size=2)
        assert ranks.check_devices(config) is None
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .* 2 are visible"):
            ranks.check_devices(replace(config, tensor_parallel_size=3))
    config = EngineConfig("none", device="cpu", tensor_parallel_size=3)
    assert ranks.check_devices(config) is not None


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(choose, "has_cuda", lambda: True)
    monkeypatch.setattr(ranks, "use_device", used.append)
    assert [ranks.claim_device("auto", rank) for rank in range(3)] == ["nccl"] * 3
    assert used == [0, 1, 2]
    assert ranks.claim_device("cpu", 1) == "gloo"
