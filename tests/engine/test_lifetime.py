"""What an engine leaves to Python's collector: little while it lives, nothing when it is gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.llm_engine import FEW_FROZEN
from nanovllm.errors import ConfigError, EngineError
from tests.checkpoints import TinyCheckpoint
from tests.devices import DEVICES, runner_of

pytestmark = [pytest.mark.usefixtures("one_thread"), DEVICES]
OPTIONS = {"max_num_seqs": 4, "max_model_len": 96, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def path(tiny: Callable[[str], TinyCheckpoint]) -> Path:
    return tiny("qwen3").path


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make_llm(path: Path, device: str, **options: Any) -> LLM:
    return LLM(path, device=device, gpu_memory_utilization=0.2, **OPTIONS, **options)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("is_idle", [True, False])
def test_no_cycle_keeps_an_engine(
    path: Path, device: str, enforce_eager: bool, is_idle: bool
) -> None:
    llm = make_llm(path, device, enforce_eager=enforce_eager)
    llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    if not is_idle:
        llm.add_request([5, 6])
        llm.step()
    runner = runner_of(llm)
    eager = runner.forward if enforce_eager else runner.forward.eager
    parts = [llm, llm.engine, llm.engine.core.scheduler, runner, runner.buffers, eager.model]
    parts += [eager.attention, *eager.model.modules()]
    references = [weakref.ref(part) for part in parts]
    del llm, runner, eager, parts
    assert [reference() for reference in references if reference() is not None] == []


@pytest.mark.usefixtures("no_collector")
def test_no_cycle_keeps_an_engine_that_failed(path: Path, device: str) -> None:
    llm = make_llm(path, device)
    runner_of(llm).forward = None  # not callable
    with pytest.raises(TypeError):
        llm.generate([[1, 2, 3]], use_tqdm=False)
    with pytest.raises(EngineError, match="TypeError"):
        llm.add_request([1, 2, 3])
    references = [weakref.ref(part) for part in (llm, llm.engine, runner_of(llm))]
    del llm
    assert [reference() for reference in references if reference() is not None] == []


def test_a_collection_during_a_run_has_little_to_walk(path: Path, device: str) -> None:
    llm = make_llm(path, device)
    assert len(gc.get_objects()) < 1000 < 100_000 < gc.get_freeze_count()
    llm.close()
    assert gc.get_freeze_count() < FEW_FROZEN
    llm.close()


def test_an_engine_that_is_dropped_leaves_nothing_frozen(path: Path, device: str) -> None:
    llm = make_llm(path, device)
    del llm
    assert gc.get_freeze_count() < FEW_FROZEN
    with pytest.raises(ConfigError):
        make_llm(path, "cpu", attention_backend="triton")
    assert gc.get_freeze_count() < FEW_FROZEN


def test_garbage_is_not_frozen(path: Path, device: str) -> None:
    class Node: ...

    node: Any = Node()
    node.itself = node
    gc.collect()  # it is old now
    reference = weakref.ref(node)
    del node
    with make_llm(path, device):
        assert reference() is None


def test_what_the_application_froze_stays_frozen(path: Path, device: str) -> None:
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    with make_llm(path, device):
        assert gc.get_freeze_count() <= num_frozen
    assert gc.get_freeze_count() > num_frozen // 2
