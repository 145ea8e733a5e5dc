"""The families that docs/adding-a-model.md adds equal transformers."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import Olmo2Config, SmolLM3Config

from nanovllm.config import ModelConfig
from nanovllm.errors import UnsupportedModelError
from nanovllm.models import llama, registry
from tests.checkpoints import SIZES, make_checkpoint
from tests.test_equals_transformers import check, make_case
from tests.threaded_ranks import engines_of

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the code blocks of the page, and return the tiny configs from the last one."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    names = {"FAMILIES": registry.FAMILIES, "Family": registry.Family, "llama": llama}
    for name, module, line in zip(("smollm3", "olmo2"), blocks[0:4:2], blocks[1:4:2], strict=True):
        family = ModuleType(name)
        exec(module, family.__dict__)
        exec(line, {**names, name: family})
    classes = {"SmolLM3Config": SmolLM3Config, "Olmo2Config": Olmo2Config, "SIZES": SIZES}
    made: dict[str, Any] = eval(f"{{{blocks[4]}}}", classes)
    return made


@pytest.fixture
def config(configs: dict[str, Any]) -> SmolLM3Config:
    return configs["smollm3"]


@pytest.mark.parametrize("name", ["smollm3", "olmo2"])
@pytest.mark.parametrize(("mode", "depth"), [("plain", 1), ("preempted-chunked", 0), ("eager", 1)])
def test_the_families_equal_transformers(
    configs: dict[str, Any], tmp_path: Path, name: str, mode: str, depth: int
) -> None:
    check(make_case(make_checkpoint(tmp_path, configs[name])), mode, depth)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_a_norm(configs: dict[str, Any], tmp_path: Path, size: int) -> None:
    """With four ranks, two hold each of the two KV heads."""
    case = make_case(make_checkpoint(tmp_path, configs["olmo2"]))
    with engines_of(size):
        check(case, "plain", 0)


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
