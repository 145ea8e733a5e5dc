"""What is said where Ray is not installed; and that nothing but its own files import it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm.cli import main, parse
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.executor.create import create_executor
from tests.jobs.test_jobs import write_rows


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "ray_workers" in name or "nanovllm.ray" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ray", r"needs Ray .*pip install 'nanovllm\[ray\]'"),
        ("uni", "tensor_parallel_size=2 needs 'mp' or 'ray'"),
        ("slurm", "must be 'mp', 'uni' or 'ray', got 'slurm'"),
    ],
)
def test_an_engine_says_what_it_needs(kind: str, message: str) -> None:
    nothing: Any = None
    config = EngineConfig("none", distributed_executor_backend=kind, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=message):
        create_executor(config, nothing, nothing)


def test_a_job_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    command = ["batch", str(path), "-o", str(tmp_path / "out.jsonl")]
    assert main([*command, "--ray"]) == 2
    assert "--ray needs Ray" in capsys.readouterr().err
    assert main([*command, "--ray-replicas", "2"]) == 2
    assert "--ray-replicas needs --ray" in capsys.readouterr().err


def test_a_server_may_have_its_workers_on_a_cluster() -> None:
    arguments = ["serve", "--distributed-executor-backend", "ray"]
    assert parse(arguments).distributed_executor_backend == "ray"
