"""The families that docs/adding-a-model.md adds equal transformers."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import ArceeConfig, Exaone4Config

from nanovllm.errors import UnsupportedModelError
from nanovllm.models import registry
from tests.checkpoints import SIZES, make_checkpoint
from tests.test_equals_transformers import check
from tests.threaded_ranks import engines_of

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the code blocks of the families, and return the tiny configs from the last block."""
    blocks = blocks_of_page()
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    names = {"FAMILIES": registry.FAMILIES, "Family": registry.Family}
    for name, module, line in zip(("exaone4", "arcee"), blocks[0:4:2], blocks[1:4:2], strict=True):
        family = ModuleType(name)
        exec(module, family.__dict__)
        exec(line, {**names, name: family})
    classes = {"Exaone4Config": Exaone4Config, "ArceeConfig": ArceeConfig, "SIZES": SIZES}
    made: dict[str, Any] = eval(f"{{{blocks[-1]}}}", classes)
    return made


def blocks_of_page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.usefixtures("configs")
def test_both_kinds_of_model_code_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(blocks_of_page()[4], {})
    ours, theirs = capsys.readouterr().out.splitlines()
    assert ours == theirs


@pytest.mark.parametrize("name", ["exaone4", "arcee"])
@pytest.mark.parametrize(("mode", "depth"), [("plain", 1), ("preempted-chunked", 0), ("eager", 1)])
def test_the_families_equal_transformers(
    configs: dict[str, Any], tmp_path: Path, name: str, mode: str, depth: int
) -> None:
    check(make_checkpoint(tmp_path, configs[name]), mode, depth)


@pytest.mark.parametrize("name", ["exaone4", "arcee"])
def test_ranks(configs: dict[str, Any], tmp_path: Path, name: str) -> None:
    with engines_of(2):
        check(make_checkpoint(tmp_path, configs[name]), "plain", 0)


@pytest.mark.parametrize(
    ("name", "architecture", "changes", "match"),
    [
        ("exaone4", "Exaone4ForCausalLM", {"layer_types": None}, "needs layer_types"),
        ("arcee", "ArceeForCausalLM", {"hidden_act": "silu"}, "hidden_act 'silu'"),
    ],
)
def test_what_they_do_not_support(
    configs: dict[str, Any], name: str, architecture: str, changes: dict[str, Any], match: str
) -> None:
    saved = {**configs[name].to_dict(), "architectures": [architecture]}
    registry.read_config(saved)
    with pytest.raises(UnsupportedModelError, match=match):
        registry.read_config({**saved, **changes})
