"""Tiny models of every family in every quantized format, with their dequantized twins."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from nanovllm import LLM, SamplingParams
from nanovllm.worker.loader import LoadingLayers
from tests.checkpoint.tiny_quantized import (
    Kind,
    Twins,
    awq_kind,
    float_kind,
    fp8_block_kind,
    gptq_kind,
    packed_kind,
    write_twins,
)
from tests.checkpoints import FAMILIES, SIZES, VARIANTS, make_checkpoint

# Sizes that two ranks can shard into whole groups and blocks of 16.
EVEN = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 3}
DELTA_NET = {
    "head_dim": 16,
    "pad_token_id": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 64}


def even(name: str, **options: Any) -> PreTrainedConfig:
    return type((VARIANTS | FAMILIES)[name])(**EVEN, **options)


MODELS = {
    "llama": even("llama", tie_word_embeddings=False),
    "qwen3-tied": even("qwen3", head_dim=16, tie_word_embeddings=True),
    "qwen2": even("qwen2"),
    "phi3": even("phi3", pad_token_id=0),
    "mixtral": even("mixtral", num_local_experts=3),
    "qwen3-moe": even("qwen3-moe", **EXPERTS, head_dim=16),
    "glm4": even("glm4", head_dim=16, pad_token_id=0),
    "gemma3": even("gemma3", head_dim=16, tie_word_embeddings=False),
    "mistral": even("mistral"),
    "qwen3.5": even("qwen3.5", **DELTA_NET),
    "qwen3.5-moe": even("qwen3.5-moe", **EXPERTS, **DELTA_NET, **SHARED_EXPERT),
    "qwen3-next": even("qwen3-next", **EXPERTS, **DELTA_NET, **SHARED_EXPERT),
}
# Formats that GPU kernels read as stored.
KEPT: dict[str, Kind] = {
    "packed": packed_kind(4, 32, True, False),
    "packed-zeros": packed_kind(4, 32, False, False),
    "packed-channel": packed_kind(4, -1, True, False),
    "awq": awq_kind(32),
    "gptq": gptq_kind(4, 32, False, False),
    "gptq-channel": gptq_kind(4, -1, True, False),
    "fp8-channel": float_kind("channel", "channel"),
    "fp8-tensor": float_kind("tensor", "tensor"),
    "fp8-block": fp8_block_kind(16, 128),
}
# Formats that no kernel supports: small groups and blocks, groups out of order, 8 bits.
DEQUANTIZED: dict[str, Kind] = {
    "packed-16": packed_kind(4, 16, False, False),
    "packed-shuffled": packed_kind(4, 32, True, True),
    "awq-16": awq_kind(16),
    "gptq-16": gptq_kind(4, 16, True, False),
    "gptq-shuffled": gptq_kind(4, 32, False, True),
    "gptq-8-bits": gptq_kind(8, -1, False, False),
    "fp8-block-16": fp8_block_kind(16, 16),
}
KINDS = KEPT | DEQUANTIZED
PROMPTS = [[3, 14, 15, 9, 26], list(range(20)), [7]]  # few and many rows
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
Kept = list[tuple[str, int]]  # name and bytes of each weight
SIZE_OPTIONS = {"kvcache_block_size": 16, "max_num_seqs": 4, "max_model_len": 64}


@cache
def source(root: Path, model: str) -> Path:
    return make_checkpoint(root / f"even-{model}", MODELS[model]).path


@cache
def twins(root: Path, model: str, kind: str) -> Twins:
    return write_twins(root / f"{model}-{kind}", source(root, model), KINDS[kind], {})


def run(path: Path, **options: Any) -> list[tuple[list[int], Any]]:
    """Return the tokens and their logprobs, which would reveal different weights."""
    options = {"dtype": "float32", "device": "cpu", **SIZE_OPTIONS, **options}
    with LLM(path, skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(output.token_ids, output.logprobs) for output in outputs]


def assert_close(got: list[tuple[list[int], Any]], want: list[tuple[list[int], Any]]) -> None:
    """Assert that two runs have equal tokens, and equal logprobs of them up to rounding."""
    for (tokens, ours), (wanted, theirs) in zip(got, want, strict=True):
        assert tokens == wanted
        for token, our, their in zip(tokens, ours, theirs, strict=True):
            assert our[token].logprob == pytest.approx(their[token].logprob, abs=1e-4)


def note_kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Return a list that fills with the weights that are loaded without being dequantized."""
    found: Kept = []
    loaded = LoadingLayers.loaded

    def note(self: LoadingLayers, name: str) -> None:
        if self.expected[name].is_quantized:
            found.append((name, self.expected[name].nbytes))
        loaded(self, name)

    monkeypatch.setattr(LoadingLayers, "loaded", note)
    return found
