"""Errors if Ray is not installed; only the Ray modules import it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nanovllm.assembly import resolve_model
from nanovllm.cli import main, parse
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from tests.batch.test_jobs import write_rows


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "ray_workers" in name or "nanovllm.ray" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)


def test_an_engine_says_what_it_needs() -> None:
    """The error comes before the search for the model, which does not exist."""
    with pytest.raises(ConfigError, match=r"needs Ray.*pip install 'nanovllm\[ray\]'"):
        resolve_model(EngineConfig("none", distributed_executor_backend="ray"))


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
