"""The feature that docs/adding-a-feature.md adds postpones background sequences."""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nanovllm import assembly
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.feature import Feature
from nanovllm.engine.scheduler import Scheduler
from nanovllm.errors import ConfigError
from nanovllm.sampling_params import SamplingParams
from tests.engine.watched import Watched, add
from tests.fake_executor import FakeExecutor, predict

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-feature.md"
MODULE = "nanovllm.features.background"
NUM_SLOTS = 4
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def background() -> type[Any]:
    module = ModuleType(f"{MODULE}.background")
    exec(programs()[0], module.__dict__)
    assert issubclass(module.Background, Feature)
    return module.Background


@pytest.fixture
def core(background: type[Any], depth: int) -> EngineCore:
    blocks = BlockManager(40, 4, enable_caching=True)
    scheduler = Scheduler(blocks, NUM_SLOTS, 100, [background(1)])
    return EngineCore(scheduler, FakeExecutor(40, 4), depth, 100)


def make(seq_id: int, priority: int, max_tokens: int = 4) -> Watched:
    params = SamplingParams(priority=priority, max_tokens=max_tokens)
    return Watched(seq_id, [seq_id + 1, 2, 3], params)


def step(core: EngineCore) -> None:
    core.step()
    core.scheduler.check()


def finish(core: EngineCore, sequences: list[Watched]) -> None:
    """Run to the end; the outputs are those of sequences that run alone."""
    while core.has_unfinished or core._in_flight:
        step(core)
    for seq in sequences:
        tokens = list(seq.request.token_ids)
        for _ in range(seq.request.params.max_tokens):
            tokens.append(predict(tokens))
        assert list(seq.token_ids) == tokens
    [feature] = core.scheduler.features
    assert not feature._others
    assert not feature._postponed


@DEPTHS
def test_background_sequences_begin_when_the_others_have_finished(core: EngineCore) -> None:
    first, chat, second = make(0, 1, 2), make(1, 0, 8), make(2, 7, 2)
    for seq in (first, chat, second):
        add(core, seq)
    while chat.finish_reason is None:
        assert first.slot == second.slot == -1
        assert {0, 2} == core.scheduler.postponed.keys()
        step(core)
    finish(core, [first, chat, second])
    assert chat.num_computed == 0 < chat.start_time < first.start_time < second.start_time


@DEPTHS
def test_those_that_have_begun_continue_beside_others(core: EngineCore) -> None:
    """The queue contains no background sequences, so a new request gets the next free slot."""
    batch = [make(i, 1, 4 + i) for i in range(12)]
    for seq in batch:
        add(core, seq)
    step(core)
    assert [seq.slot >= 0 for seq in batch] == [True] * NUM_SLOTS + [False] * 8
    assert len(core.scheduler.waiting) == 0
    chat = make(99, 0, 9)
    add(core, chat)
    while chat.finish_reason is None:
        step(core)
        assert not any(seq.start_time for seq in batch[NUM_SLOTS:])
    assert batch[0].finish_reason == "length"
    finish(core, [*batch, chat])
    assert [seq.start_time for seq in batch] == sorted(seq.start_time for seq in batch)


@DEPTHS
def test_sequences_that_end_early_are_forgotten(core: EngineCore) -> None:
    chat, aborted, left = make(0, 0, 9), make(1, 1), make(2, 1)
    for seq in (chat, aborted, left):
        add(core, seq)
    step(core)
    core.finish(aborted.seq_id, "abort")
    core.finish(chat.seq_id, "abort")
    step(core)
    assert left.slot >= 0
    finish(core, [left])


def test_the_lines_that_plug_it_in(background: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    features: list[Feature] = []
    names = {"require_feature": assembly.require_feature, "ConfigError": ConfigError}
    names |= {"config": SimpleNamespace(background_priority=1), "features": features}
    with pytest.raises(ConfigError, match="background_priority needs nanovllm/features/background"):
        exec(programs()[1], dict(names))
    folder, file = ModuleType(MODULE), ModuleType(f"{MODULE}.background")
    folder.__spec__ = ModuleSpec(MODULE, None, origin="__init__.py")
    file.Background = background
    monkeypatch.setitem(sys.modules, MODULE, folder)
    monkeypatch.setitem(sys.modules, file.__name__, file)
    exec(programs()[1], dict(names))
    assert [type(feature) for feature in features] == [background]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_running_engine(background: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    [shown] = re.findall(r"```\n```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, Any] = {"Background": background}
    exec(programs()[2], scope)
    scope["llm"].close()
    assert capsys.readouterr().out == shown
