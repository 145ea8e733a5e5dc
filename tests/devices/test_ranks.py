"""How many ranks a machine has devices for."""

from __future__ import annotations

import pytest

from nanovllm.devices import choose
from nanovllm.errors import ConfigError


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_cuda", lambda: True)
    monkeypatch.setattr(choose, "num_devices", lambda: 2)
    for device in ("auto", "cuda"):
        choose.check_num_ranks(device, 2)
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .* 2 can be seen"):
            choose.check_num_ranks(device, 3)
    choose.check_num_ranks("cpu", 3)


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(choose, "has_cuda", lambda: True)
    monkeypatch.setattr(choose, "use_device", used.append)
    assert [choose.claim_device("auto", rank) for rank in range(3)] == ["nccl"] * 3
    assert used == [0, 1, 2]
    assert choose.claim_device("cpu", 1) == "gloo"
