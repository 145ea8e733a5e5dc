"""How many ranks a machine has devices for."""

from __future__ import annotations

import pytest

from nanovllm.errors import ConfigError
from nanovllm.platforms import ranks


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "has_cuda", lambda: True)
    monkeypatch.setattr(ranks, "num_devices", lambda: 2)
    for device in ("auto", "cuda"):
        ranks.check_num_ranks(device, 2)
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .* 2 can be seen"):
            ranks.check_num_ranks(device, 3)
    ranks.check_num_ranks("cpu", 3)


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(ranks, "has_cuda", lambda: True)
    monkeypatch.setattr(ranks, "use_device", used.append)
    assert [ranks.claim_device("auto", rank) for rank in range(3)] == ["nccl"] * 3
    assert used == [0, 1, 2]
    assert ranks.claim_device("cpu", 1) == "gloo"
