"""Tiny random checkpoints, and the tokens that transformers generates from them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

VOCAB_SIZE = 160
MIN_GAP = 1e-3  # minimum gap between the top two logits; rounding could close a smaller one

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, head_dim=24, tie_word_embeddings=False),
    "llama-tied-rope": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "llama-mha-bias": LlamaConfig(
        **{**SIZES, "num_key_value_heads": 4}, attention_bias=True, mlp_bias=True
    ),
}


YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA_NET = {
    "head_dim": 16,
    "pad_token_id": 0,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
WINDOW = 20  # not a multiple of the block size

# Families whose checkpoints store norm weights minus one.
CENTERED = (
    Gemma2Config,
    Gemma3TextConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5TextConfig,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
)

FINAL_NORMS = ("model.norm.weight", "model.language_model.norm.weight")

# Further families, with checkpoints for the features that each one adds.
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama-linear": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    ),
    "llama-dynamic": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 52},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "ministral": MinistralConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=16,
        pad_token_id=0,
        sliding_window=WINDOW,
        layer_types=["full_attention", *["sliding_attention"] * 3],
    ),
    "ministral3": Ministral3Config(
        **SIZES,
        head_dim=16,
        pad_token_id=0,
        rope_parameters={
            **YARN_ROPE,
            "original_max_position_embeddings": 16,  # most prompts are longer
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    ),
    "mistral-whole": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3-yarn": Qwen3Config(**SIZES, head_dim=32, rope_parameters=YARN_ROPE),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=16, num_experts=6, norm_topk_prob=True
    ),
    "qwen3-moe-mixed": Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=16, num_experts=5, mlp_only_layers=[1]
    ),
    "qwen3.5": Qwen3_5TextConfig(
        **{**SIZES, "num_hidden_layers": 5},
        **DELTA_NET,
        full_attention_interval=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
        },
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **{**SIZES, "num_hidden_layers": 6},
        **EXPERTS,
        **DELTA_NET,
        num_experts=6,
        shared_expert_intermediate_size=32,
        full_attention_interval=3,
    ),
    "qwen3-next": Qwen3NextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        **EXPERTS,
        **DELTA_NET,
        num_experts=5,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[1],
        full_attention_interval=2,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=WINDOW),
    "gemma2": Gemma2Config(
        **SIZES,
        head_dim=16,
        tie_word_embeddings=False,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=40.0,
        attn_implementation="eager",  # SDPA has no softcapping
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        tie_word_embeddings=False,  # with tied, scaled embeddings, it would repeat the last token
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3-six": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 1},
        head_dim=16,
        tie_word_embeddings=False,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
    ),
    "phi3": Phi3Config(**SIZES, pad_token_id=0, sliding_window=WINDOW),
    "glm4": Glm4Config(**SIZES, head_dim=32, pad_token_id=0),
    "glm": GlmConfig(**SIZES, head_dim=24, pad_token_id=0, partial_rotary_factor=0.25),
    "granite": GraniteConfig(
        **SIZES,
        attention_bias=True,
        embedding_multiplier=6.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=0.75,
        rms_norm_eps=1e-2,  # large, so that a wrong eps shows
    ),
    "olmo2": Olmo2Config(**SIZES, pad_token_id=0, attention_bias=True),
    "olmo3": Olmo3Config(
        **{**SIZES, "num_hidden_layers": 4},
        pad_token_id=0,
        sliding_window=WINDOW,
        rope_parameters={
            "full_attention": {**YARN_ROPE, "rope_theta": 5e5, "attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "smollm3": SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 4}, pad_token_id=0, rope_parameters=YARN_ROPE
    ),
}


@dataclass(frozen=True)
class TinyCheckpoint:
    path: Path
    model: Any  # the transformers model

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Return greedy tokens; assert that each leads the runner-up by a clear gap."""
        return list(_generate(self.model, tuple(prompt), max_tokens))

    @cached_property
    def _exact(self) -> Any:
        return copy.deepcopy(self.model).double()

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Return the logprobs of the token after each position, computed in float64."""
        with torch.inference_mode():
            logits: torch.Tensor = self._exact(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(-1)

    def assert_greedy(self, prompts: list[list[int]], outputs: list[list[int]]) -> None:
        """Assert that greedy search gives these outputs, by one pass over all of them.

        By induction: each token is the argmax after the tokens before it.
        """
        max_tokens = len(outputs[0])
        if _depends_on_company(self.model.config):
            assert outputs == [self.generate(prompt, max_tokens) for prompt in prompts]
            return
        ids = _pad([[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)])
        first = torch.tensor([len(prompt) - 1 for prompt in prompts])[:, None]
        with torch.inference_mode():
            logits = self.model(ids, use_cache=False).logits
        top2 = logits[torch.arange(len(ids))[:, None], first + torch.arange(max_tokens)].topk(2)
        gaps = (top2.values[..., 0] - top2.values[..., 1]).amin(1).tolist()
        for prompt, output, best, gap in zip(
            prompts, outputs, top2.indices[..., 0].tolist(), gaps, strict=True
        ):
            # A batch rounds differently, so `generate` decides about near ties.
            assert output == (best if gap > 1.05 * MIN_GAP else self.generate(prompt, max_tokens))

    def answers(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Return the greedy tokens of many prompts, as `generate` does, but faster.

        The prompts run as one batch.
        """
        if _depends_on_company(self.model.config):
            return [self.generate(prompt, max_tokens) for prompt in prompts]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = _pad([[*prompt, *[0] * max_tokens] for prompt in prompts])
        rows = torch.arange(len(prompts))
        with torch.inference_mode():
            for i in range(max_tokens):
                width = int(lengths.max()) + i
                logits = self.model(ids[:, :width], use_cache=False).logits[rows, lengths + i - 1]
                top2 = logits.topk(2)
                gap = (top2.values[:, 0] - top2.values[:, 1]).min().item()
                if gap < 1.05 * MIN_GAP:  # a batch rounds differently: let `generate` decide
                    return [self.generate(prompt, max_tokens) for prompt in prompts]
                ids[rows, lengths + i] = top2.indices[:, 0]
        return [
            ids[row, length : length + max_tokens].tolist()
            for row, length in enumerate(lengths.tolist())
        ]


@cache
def _generate(model: Any, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Return greedy tokens; cached, because many tests need the same ones."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top2 = torch.cat(output.logits).topk(2).values
    gap = (top2[:, 0] - top2[:, 1]).min().item()
    assert gap > MIN_GAP, f"top-2 gap {gap:.1e}: choose another seed for this checkpoint"
    answer: list[int] = output.sequences[0, len(prompt) :].tolist()
    return answer


def _pad(rows: list[list[int]]) -> torch.Tensor:
    """Pad rows at the end, which causal attention ignores."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _depends_on_company(config: PreTrainedConfig) -> bool:
    """Whether the longest row of a batch determines the RoPE frequencies of all rows."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") == "dynamic"


def make_checkpoint(
    path: Path, config: PreTrainedConfig, seed: int = 0, auto_class: Any = AutoModelForCausalLM
) -> TinyCheckpoint:
    torch.manual_seed(seed)
    model = auto_class.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases would otherwise be ones and zeros
                parameter.add_(0.1 * torch.randn(parameter.shape))
            if name in FINAL_NORMS:  # larger logits make near ties rare
                offset = 1.0 if isinstance(config, CENTERED) else 0.0
                parameter.add_(offset).mul_(10.0).sub_(offset)
    model.save_pretrained(path)
    return TinyCheckpoint(path, model)


@cache
def shared_checkpoint(root: Path, variant: str) -> TinyCheckpoint:
    return make_checkpoint(root / variant, (VARIANTS | FAMILIES)[variant])
