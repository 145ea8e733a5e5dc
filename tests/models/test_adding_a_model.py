"""The family that docs/adding-a-model.md adds equals transformers."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import SmolLM3Config

from nanovllm.config import ModelConfig
from nanovllm.errors import UnsupportedModelError
from nanovllm.models import llama, registry
from tests.checkpoints import SIZES, make_checkpoint
from tests.test_equals_transformers import check, make_case

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> SmolLM3Config:
    """Run the three code blocks of the page, and return the tiny config from the last one."""
    module, line, entry = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    smollm3 = ModuleType("smollm3")
    exec(module, smollm3.__dict__)
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    names = {"FAMILIES": registry.FAMILIES, "Family": registry.Family}
    exec(line, {**names, "llama": llama, "smollm3": smollm3})
    made: SmolLM3Config = eval(f"{{{entry}}}", {"SmolLM3Config": SmolLM3Config, "SIZES": SIZES})[
        "smollm3"
    ]
    return made


@pytest.mark.parametrize(("mode", "depth"), [("plain", 1), ("preempted-chunked", 0), ("eager", 1)])
def test_the_family_equals_transformers(
    config: SmolLM3Config, tmp_path: Path, mode: str, depth: int
) -> None:
    check(make_case(make_checkpoint(tmp_path, config)), mode, depth)


def test_layers_without_rotation_know_nothing_of_its_scaling(
    config: SmolLM3Config, tmp_path: Path
) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 2e6, "factor": 4.0}
    config.rope_parameters = {**yarn, "original_max_position_embeddings": 64}
    check(make_case(make_checkpoint(tmp_path, config)), "plain", 1)


def read(config: SmolLM3Config, **changes: Any) -> ModelConfig:
    saved = {**config.to_dict(), "architectures": ["SmolLM3ForCausalLM"]}
    return registry.read_config({**saved, **changes})


def test_its_config(config: SmolLM3Config) -> None:
    model = read(config)
    assert [layer.rope.kind for layer in model.layers] == ["default"] * 3 + ["linear"]
    assert model == read(config, no_rope_layers=None)
    with pytest.raises(UnsupportedModelError, match="use_sliding_window"):
        read(config, use_sliding_window=True)
