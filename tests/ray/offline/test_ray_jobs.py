"""Batch jobs on a Ray cluster of three nodes equal those of one engine, whatever is killed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.batch.batch_engine import RowEngine, RowOptions
from nanovllm.batch.progress_file import ProgressFile
from nanovllm.batch.rows import scan
from nanovllm.batch.run_batch import run_job
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.serve.server_options import ServerOptions
from tests.batch.test_batch_command import batch, by_id, mixed_rows
from tests.batch.test_jobs import read_lines, write_rows
from tests.ray.clusters import add_node

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def options(model: Path, engine_options: dict[str, Any]) -> RowOptions:
    config = EngineConfig(str(model), **engine_options)
    return RowOptions(config, ServerOptions(served_model_name=("tiny",)))


async def answer_all(
    make_engine: Callable[[], Any],
    path: Path,
    output: Path,
    max_concurrency: int,
    on_line: Callable[[Any, int], None] = lambda engine, count: None,
) -> dict[str, Any]:
    """Run a whole job; `on_line` gets the engine and the number of finished rows."""
    found = scan(path)
    progress_file, engine = ProgressFile(output, {}, found.num_rows, overwrite=False), make_engine()
    try:
        await run_job(
            path,
            progress_file,
            engine,
            max_concurrency,
            lambda line: on_line(engine, progress_file.num_done),
        )
    finally:
        engine.close()
        progress_file.close()
    assert (
        progress_file.num_done
        == found.num_rows
        == len(read_lines(output)) + progress_file.num_errors
    )
    return by_id(output)


def busiest(engine: Any) -> Any:
    """Return the ready engine with the fewest free slots."""
    lost = {*engine._waiting.values()}
    free = [number for _, number in engine.free._queue]
    ready = [number for number in range(len(engine.actors)) if number not in lost]
    return engine.actors[min(ready, key=free.count)]


@pytest.mark.endurance
def test_killed_actors_and_a_lost_node_cost_no_row(
    cluster: Any,
    options: RowOptions,
    tmp_path: Path,
    count: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    import ray

    from nanovllm.batch.ray_batch import EnginePlacement, RayEngine

    num_rows, num_kills = count(2000, few=120), max(count(50) // 10, 1)
    rows = [*mixed_rows(num_rows), {"prompt": "x" * 1000}]
    path = write_rows(tmp_path / "in.jsonl", rows)
    whole = asyncio.run(
        answer_all(
            lambda: RowEngine(options), path, tmp_path / "whole.jsonl", options.max_concurrency
        )
    )
    kills = {(i + 1) * num_rows // (num_kills + 3): i for i in range(num_kills + 1)}
    node = cluster.list_all_nodes()[-1]
    removal = threading.Thread(target=cluster.remove_node, args=[node], daemon=True)

    def disturb(engine: Any, num_done: int) -> None:
        if kills.get(num_done) == 0:
            removal.start()
        elif num_done in kills:
            ray.kill(busiest(engine), no_restart=False)

    room = EnginePlacement(3, {"num_cpus": 1})
    with caplog.at_level(logging.WARNING, "nanovllm"):
        disturbed = asyncio.run(
            answer_all(
                lambda: RayEngine(options, room),
                path,
                tmp_path / "disturbed.jsonl",
                3 * options.max_concurrency,
                disturb,
            )
        )
    removal.join()
    add_node(cluster)
    assert len(disturbed) == num_rows
    assert disturbed == whole
    assert sum("an engine was lost" in record.message for record in caplog.records) >= num_kills


def test_the_command_runs_on_a_cluster(model: Path, options: RowOptions, tmp_path: Path) -> None:
    """tests/batch/test_batch_command.py tests the continuation of killed jobs."""
    path = write_rows(tmp_path / "in.jsonl", mixed_rows(60))
    output = tmp_path / "out.jsonl"
    code, shown = batch(model, path, output, "--ray", "--ray-replicas", "1")
    assert code == 0, shown
    assert "60 of 60 rows completed" in shown
    whole = asyncio.run(
        answer_all(
            lambda: RowEngine(options), path, tmp_path / "whole.jsonl", options.max_concurrency
        )
    )
    assert by_id(output) == whole


def test_what_cannot_be_is_refused(options: RowOptions, tmp_path: Path) -> None:
    from nanovllm.batch.ray_batch import EnginePlacement, RayEngine, place_engines

    assert place_engines(options.config) == EnginePlacement(3, {"num_cpus": 1})
    with pytest.raises(ConfigError, match=r"4 engines with num_cpus=1 each .* room for 3"):
        place_engines(options.config, 4)
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    broken = RowOptions(EngineConfig(str(tmp_path), device="cpu"), options.server)
    with pytest.raises(Exception, match=r"config\.json"):
        asyncio.run(
            answer_all(
                lambda: RayEngine(broken, EnginePlacement(1, {"num_cpus": 1})),
                path,
                tmp_path / "out",
                1,
            )
        )


def test_an_engine_has_a_gpu_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from nanovllm.batch.ray_batch import EnginePlacement, place_engines

    gpus = [8, 0, 3, 2]
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": float(n)}} for n in gpus]
    nodes.append({"Alive": False, "Resources": {"GPU": 8.0}})
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert place_engines(EngineConfig("m", tensor_parallel_size=2)) == EnginePlacement(
        6, {"num_gpus": 2}
    )
    assert place_engines(EngineConfig("m"), 5) == EnginePlacement(5, {"num_gpus": 1})
    assert place_engines(EngineConfig("m", device="cpu")) == EnginePlacement(4, {"num_cpus": 4})
    assert place_engines(EngineConfig("m", device="cpu"), 8) == EnginePlacement(8, {"num_cpus": 2})
    with pytest.raises(ConfigError, match=r"num_gpus=16 each do not fit .* room for 0"):
        place_engines(EngineConfig("m", tensor_parallel_size=16))
