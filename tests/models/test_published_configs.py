"""What is read from published config.json files: the fields that matter are in published/."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanovllm.checkpoint.find import eos_token_ids, find_checkpoint, stores_quantized
from nanovllm.config import (
    ExpertsConfig,
    LayerAttention,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
)
from nanovllm.errors import CheckpointError
from nanovllm.models.config_json import NO_ROPE
from nanovllm.models.registry import read_config, read_config_for

FOLDER = Path(__file__).parent / "published"


def published(name: str) -> dict[str, Any]:
    """Return a published config, or the part of it that the text model is read from."""
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return config


def test_qwen3_5() -> None:
    model = read_config(published("qwen3.5-35b-a3b"))
    assert sizes(model) == (40, 2048, 16, 2, 256)
    assert set(model.layers) == {LayerAttention(RopeConfig(1e7, rotary_dim=64))}
    recurrent = frozenset(i for i in range(40) if i % 4 != 3)
    assert model.recurrent == RecurrentConfig(recurrent, 16, 32, 128, 128, 4)
    assert model.experts == ExpertsConfig(256, 8, 512, is_normalized=True, shared_size=512)
    assert model.has_output_gate
    assert model.norm_offset == 1


def test_smollm3() -> None:
    model = read_config(published("smollm3-3b"))
    assert sizes(model) == (36, 2048, 16, 4, 128)
    assert model.tie_word_embeddings
    assert [layer.rope == NO_ROPE for layer in model.layers] == [False, False, False, True] * 9
    assert model.layers[0].rope.theta == 5e6


def test_olmo2() -> None:
    model = read_config(published("olmo2-7b"))
    assert sizes(model) == (32, 4096, 32, 32, 128)
    assert set(model.layers) == {LayerAttention(RopeConfig(5e5))}


def test_olmo3() -> None:
    model = read_config(published("olmo3-7b"))
    assert sizes(model) == (32, 4096, 32, 32, 128)
    assert model.max_position_embeddings == 65536
    yarn = RopeConfig(
        5e5, "yarn", 8.0, original_max_position=8192, attention_factor=1.2079441541679836
    )
    local = LayerAttention(RopeConfig(5e5), window=4096)
    assert model.layers == (local, local, local, LayerAttention(yarn)) * 8


def test_granite() -> None:
    model = read_config(published("granite-2b"))
    assert sizes(model) == (40, 2048, 32, 8, 64)
    assert (model.attention_scale, model.embedding_scale) == (1 / 64, 12.0)
    assert (model.embedding_divisor, model.logits_scale) == (0.22, 1 / 8)
    assert model.rms_norm_eps == pytest.approx(1e-5 / 0.22**2)


@pytest.mark.parametrize("name", ["Glm4ForCausalLM", "GlmForCausalLM"])
def test_glm4(name: str) -> None:
    model = read_config({**published("glm4-9b"), "architectures": [name]})
    assert sizes(model) == (40, 4096, 32, 2, 128)
    assert (model.qkv_bias, model.output_bias) == (True, False)
    rope = RopeConfig(1e4, rotary_dim=64, is_interleaved=True)
    assert set(model.layers) == {LayerAttention(rope)}
    with pytest.raises(CheckpointError, match="rotates 13 of 128"):
        read_config({**published("glm4-9b"), "partial_rotary_factor": 0.1015625})


def test_gemma2() -> None:
    model = read_config(published("gemma2-2b"))
    assert sizes(model) == (26, 2304, 8, 4, 256)
    assert (model.attention_softcap, model.logits_softcap) == (50.0, 30.0)
    assert (model.attention_scale, model.embedding_scale) == (1 / 16, 48.0)
    assert (model.tie_word_embeddings, model.activation) == (True, "gelu_tanh")
    rope = RopeConfig(1e4)
    assert model.layers == (LayerAttention(rope, 4096), LayerAttention(rope)) * 13
    off = read_config({**published("gemma2-2b"), "attn_logit_softcapping": None})
    assert (off.attention_softcap, off.logits_softcap) == (None, 30.0)


def test_ministral3() -> None:
    model = read_config(published("ministral3-8b"))
    assert sizes(model) == (34, 4096, 32, 8, 128)
    assert model.max_position_embeddings == 262144
    rope = RopeConfig(1e6, "yarn", 16.0, original_max_position=16384, q_scaling=0.1)
    assert set(model.layers) == {LayerAttention(rope)}


def test_gemma3_with_images(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "gemma3-4b.json", tmp_path / "config.json")
    found = find_checkpoint(str(tmp_path), need_weights=False, need_tokenizer=False)
    assert eos_token_ids(found) == (1, 106)
    model = read_config(found.config)
    assert sizes(model) == (34, 2560, 8, 4, 256)
    assert (model.vocab_size, model.dtype) == (262208, "bfloat16")
    assert model.max_position_embeddings == 131072
    local = LayerAttention(RopeConfig(1e4), window=1024)
    assert model.layers[:6] == (*[local] * 5, LayerAttention(RopeConfig(1e6, "linear", 8.0)))


def test_gpt_oss() -> None:
    assert not stores_quantized(published("gpt-oss-20b"))
    model = read_config_for(published("gpt-oss-20b"), "auto")
    assert sizes(model) == (24, 2880, 64, 8, 64)
    assert [layer.window for layer in model.layers] == [128, None] * 12


def sizes(model: ModelConfig) -> tuple[int, int, int, int, int]:
    """Return the sizes that most published configs differ in."""
    heads = model.num_heads, model.num_kv_heads
    return len(model.layers), model.hidden_size, *heads, model.head_dim
