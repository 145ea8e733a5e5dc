"""Fixtures shared by the whole suite."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.kept_kernels import keep_kernels, restore_kernels

if TYPE_CHECKING:
    from tests.checkpoints import TinyCheckpoint

# The longest tests come first, so that none is still running when all others are done.
FIRST = (
    "tests/devices/cpu/test_numba_attention.py",
    "tests/devices/cpu/test_experts.py",
    "tests/devices/cuda/kernels/test_interpreted.py",
    # Meanwhile, the other process compiles the kernels that servers need.
    "tests/devices/cuda/persistent/",
    "tests/serve/",
    "tests/ray/",
    "tests/test_structured.py",
    "tests/devices/cuda/test_interpreted_engine.py",
    "tests/clients/",
    "tests/serve/test_async_llm.py",
    "tests/parallel/",
    "tests/devices/cpu/test_captured_forward.py",
    "tests/test_equals_transformers.py",
    "tests/test_tensor_parallel.py",
    "tests/test_documented_programs.py",
    "tests/test_example.py",
    "tests/batch/",
)
SHARED = {
    "tests/serve/": "server",
    "tests/ray/": "ray",
    "tests/clients/": "clients",
    "tests/learn/": "learn",
    # The kernels of experts compile in half the time after the other kernels.
    "tests/devices/cpu/test_numba_attention.py": "kernels",
    "tests/devices/cpu/test_experts.py": "kernels",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-counts", action="store_true", help="run endurance tests in full")


@pytest.fixture(scope="session")
def count(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Return a function that reduces a number of cases to a tenth or `few` by default."""
    is_whole = request.config.getoption("--all-counts")

    def num_cases(number: int, few: int | None = None) -> int:
        return number if is_whole else few or max(number // 10, 1)

    return num_cases


def pytest_configure(config: pytest.Config) -> None:
    """Let several processes share the cores and the GPU."""
    worker = getattr(config, "workerinput", None)
    if worker is None:  # the xdist controller needs no torch
        restore_kernels()
    else:
        import torch

        num_cores = max((os.cpu_count() or 1) // worker["workercount"], 1)
        torch.set_num_threads(num_cores)
        os.environ["OMP_NUM_THREADS"] = str(num_cores)  # of child processes
        if torch.cuda.is_available():
            from tests.devices.shared_gpu import share_gpu

            share_gpu(num_cores)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the GPU and what its tests depend on."""
    if config.option.markexpr != "gpu" or importlib.util.find_spec("triton") is None:
        return None
    from tests.devices.shared_gpu import versions

    return versions()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while tests are collected: visiting all objects is slow."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test that `-m` selects, because importing all of them is slow."""
    mark = config.option.markexpr.partition(" ")[0]
    if mark not in ("slow", "endurance") or not collection_path.match("test_*.py"):
        return None
    return f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: order_of(item.nodeid))
    if not config.getoption("--all-counts"):
        for item in items:
            if item.get_closest_marker("exhaustive"):
                item.add_marker(pytest.mark.skip(reason="make endurance runs it"))


def order_of(nodeid: str) -> int:
    return next((i for i, path in enumerate(FIRST) if nodeid.startswith(path)), len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file, and tests that share slow fixtures, in one process."""
    from xdist.scheduler import LoadFileScheduling

    class FilesOrShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = (name for path, name in SHARED.items() if nodeid.startswith(path))
            return next(shared, None) or super()._split_scope(nodeid)

    return FilesOrShared(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """Exclude existing objects from garbage collection, which every engine runs when it starts."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
    if not hasattr(session.config, "workerinput"):
        keep_kernels()


@pytest.fixture(scope="session", autouse=True)
def shared_machine_code() -> Iterator[None]:
    """Load the machine code of the CPU kernels once instead of for every engine."""
    if importlib.util.find_spec("numba") is None:
        yield
        return
    from nanovllm.devices.cpu import program
    from nanovllm.devices.cpu.kernels import interpreter

    @functools.cache
    def compile_once(kernel: Any, *dtypes: Any) -> Any:
        return interpreter.compile_kernel(interpreter.Compiler(), kernel, *dtypes)

    loop = functools.cache(lambda: interpreter.compile_interpreter(interpreter.Compiler()))
    with (
        patch.object(program, "compile_interpreter", lambda compiler: loop()),
        patch.object(program, "compile_kernel", lambda compiler, *what: compile_once(*what)),
    ):
        yield


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny(checkpoint_root: Path) -> Callable[[str], TinyCheckpoint]:
    """Return a function from variant name to tiny random checkpoint, created once per session."""
    from tests.checkpoints import shared_checkpoint

    return lambda variant: shared_checkpoint(checkpoint_root, variant)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread for tiny models: synchronizing threads in every kernel is slow."""
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
