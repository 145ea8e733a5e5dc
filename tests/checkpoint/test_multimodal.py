"""The text models of multimodal checkpoints generate what transformers generates from text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nanovllm import LLM, SamplingParams
from tests.checkpoints import SIZES, VOCAB_SIZE, TinyCheckpoint, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
VISION = {"depth": 1, "intermediate_size": 16, "num_heads": 2}
OUT = {"hidden_size": 16, "out_hidden_size": SIZES["hidden_size"]}
VISIONS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**VISION, "embed_dim": 16, "hidden_size": SIZES["hidden_size"]},
    "qwen2_5_vl": {**VISION, **OUT, "fullatt_block_indexes": [0]},
    "qwen3_vl": {**VISION, **OUT, "deepstack_visual_indexes": [0]},
    "gemma3": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2},
}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rope_parameters": MROPE},
    "qwen2_5_vl": {"rope_parameters": MROPE},
    "qwen3_vl": {"rope_parameters": MROPE, "head_dim": 12},
    "gemma3": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20},
}


def make_tiny(path: Path, model_type: str, is_tied: bool) -> TinyCheckpoint:
    """Write a checkpoint that says only at the top level whether its embeddings are tied."""
    text = {**SIZES, **TEXTS[model_type], "tie_word_embeddings": False}
    parts = {"text_config": text, "vision_config": VISIONS[model_type]}
    config = CONFIG_MAPPING[model_type](**parts, tie_word_embeddings=is_tied)
    return make_checkpoint(path, config, auto_class=AutoModelForImageTextToText)


def check(path: Path, checkpoint: TinyCheckpoint, architecture: str, **options: Any) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 16, 33, 48)]
    with LLM(path, skip_tokenizer_init=True, max_model_len=128, **options) as llm:
        assert llm.engine.model_config.architecture == architecture
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [
        checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts
    ]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("qwen2_vl", "Qwen2ForCausalLM"),
        ("qwen2_5_vl", "Qwen2ForCausalLM"),
        ("qwen3_vl", "Qwen3ForCausalLM"),
        ("gemma3", "Gemma3ForCausalLM"),
    ],
)
def test_text_equals_transformers(
    tmp_path: Path, model_type: str, architecture: str, is_tied: bool
) -> None:
    checkpoint = make_tiny(tmp_path, model_type, is_tied)
    assert any("vis" in name for name, _ in checkpoint.model.named_parameters())
    check(tmp_path, checkpoint, architecture)
    if is_tied:
        check(tmp_path, checkpoint, architecture, model_impl="transformers")


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_qwen_vl_as_published(tmp_path: Path, model_type: str) -> None:
    """The config has no `text_config`, and names the kind of its rotary embedding."""
    checkpoint = make_tiny(tmp_path, model_type, is_tied=True)
    whole = json.loads((tmp_path / "config.json").read_text())
    text = whole.pop("text_config")
    del text["rope_parameters"], text["tie_word_embeddings"]
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
    (tmp_path / "config.json").write_text(json.dumps({**text, **rope, **whole}))
    check(tmp_path, checkpoint, "Qwen2ForCausalLM")
    check(tmp_path, checkpoint, "Qwen2ForCausalLM", model_impl="transformers")
