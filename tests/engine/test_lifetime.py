"""Garbage collection: an engine creates little garbage, and is freed without the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import EngineError
from tests.checkpoints import TinyCheckpoint
from tests.devices import DEVICES, runner_of

pytestmark = [pytest.mark.usefixtures("one_thread"), DEVICES]
OPTIONS = {"max_num_seqs": 4, "max_model_len": 96, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def path(tiny: Callable[[str], TinyCheckpoint]) -> Path:
    return tiny("qwen3").path


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
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
    parts = [
        llm,
        llm.engine,
        llm.engine.core.scheduler,
        runner,
        runner.eager.input_batch,
        eager.model,
    ]
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


@pytest.mark.usefixtures("thawed")
def test_no_full_collection_during_a_run(path: Path, device: str) -> None:
    """A full collection would visit every imported module."""
    with make_llm(path, device) as llm:
        before = gc.get_stats()
        prompts = [[i % 100, i // 100] for i in range(400)]
        llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        after = gc.get_stats()
    assert after[0]["collections"] > before[0]["collections"]
    assert after[2]["collections"] == before[2]["collections"]


@pytest.mark.usefixtures("thawed")
def test_a_cycle_around_an_engine_can_be_collected(path: Path, device: str) -> None:
    class Holder:
        """An application object that is older than the engine it refers to."""

        def __init__(self) -> None:
            self.itself = self
            self.llm = make_llm(path, device)

    holder = Holder()
    references = [weakref.ref(part) for part in (holder, holder.llm, runner_of(holder.llm))]
    del holder
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []
