"""Fixtures shared by the whole suite."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

if TYPE_CHECKING:
    from tests.checkpoints import TinyCheckpoint

SHARING = ("tests/server/", "tests/ray/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-counts", action="store_true", help="run endurance tests in full")


@pytest.fixture(scope="session")
def count(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How many cases of so many to run: a tenth, unless all are asked for."""
    is_whole = request.config.getoption("--all-counts")
    return lambda number: number if is_whole else max(number // 10, 1)


def pytest_configure(config: pytest.Config) -> None:
    """Let several processes share the cores; tests of threads ask for as many as they want."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:  # the process that only hands out tests needs no torch
        import torch

        torch.set_num_threads(max((os.cpu_count() or 1) // worker["workercount"], 1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process, and all that share a server or a cluster."""
    from xdist.scheduler import LoadFileScheduling

    class FilesOrServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = [name for name in SHARING if nodeid.startswith(name)]
            return shared[0] if shared else super()._split_scope(nodeid)

    return FilesOrServer(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """Freeze what there is, as an application may: every engine collects garbage when it starts."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def shared_machine_code() -> Iterator[None]:
    """Load the machine code of the CPU kernels once instead of for every engine."""
    if importlib.util.find_spec("numba") is None:
        yield
        return
    from nanovllm.kernels.cpu import program

    shared = functools.cache(program.compile_interpreter)
    with patch.object(program, "compile_interpreter", shared):
        yield


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny(checkpoint_root: Path) -> Callable[[str], TinyCheckpoint]:
    """A tiny random checkpoint by variant name, made once per session."""
    from tests.checkpoints import shared_checkpoint

    return lambda variant: shared_checkpoint(checkpoint_root, variant)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny models: where cores are busy, meeting a second thread in every kernel takes long."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=[1, 2, 3], ids="{}-threads".format)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
