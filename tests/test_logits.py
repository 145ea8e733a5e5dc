"""Logits in every dtype are as close to the exact ones as transformers' on the same device."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from nanovllm import LLM
from nanovllm.devices.cpu.features import find_cpu_features
from tests.checkpoints import FAMILIES, SIZES, VARIANTS, TinyCheckpoint, make_checkpoint
from tests.devices import NEEDS_GPU
from tests.forced_tokens import Ids, forced_logits
from tests.models.transformers_families import make_config
from tests.ops.delta_nets import exact_delta_rules

WIDE = Qwen3Config(  # heads as large as those of real models
    **{
        **SIZES,
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "initializer_range": 0.08,
    },
    head_dim=128,
)
CONFIGS = VARIANTS | FAMILIES | {"wide": WIDE}
PROMPT_LENS = (1, 2, 15, 16, 17, 48, 70, 130)
NUM_NEW = 12
# Allowed ratio of our RMS error to transformers'; the largest error may have twice this ratio.
FACTORS = {"float32": 3.0, "float16": 1.5, "bfloat16": 1.5}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "alone": {"max_num_seqs": 1},  # on CUDA: the kernels for one row
    "chunked": {"max_num_batched_tokens": 23},
    "padded": {"max_num_seqs": 30},  # on CUDA: 16 rows or more, in graphs for 16 and 24 rows
}
CASES = [
    *(("wide", "bfloat16", mode) for mode in MODES if mode != "padded"),
    ("wide", "float16", "plain"),
    ("wide", "float32", "plain"),
    # transformers rotates prompts with dynamic RoPE differently: see docs/models.md.
    *((name, "float32", "chunked") for name in FAMILIES if name != "llama-dynamic"),
    ("qwen3-tied", "bfloat16", "alone"),
    ("llama-mha-bias", "bfloat16", "plain"),
    ("gemma2", "bfloat16", "plain"),
    ("gemma3", "bfloat16", "plain"),
    ("mistral", "bfloat16", "chunked"),
    ("ministral3", "bfloat16", "plain"),
    ("mixtral", "float16", "plain"),
    ("phi3", "bfloat16", "plain"),
    ("glm4", "bfloat16", "plain"),
    ("granite", "bfloat16", "plain"),
    ("olmo2", "bfloat16", "plain"),
    ("olmo3", "bfloat16", "chunked"),
    ("smollm3", "bfloat16", "plain"),
    ("qwen2-window", "float16", "plain"),
    ("qwen3-moe", "bfloat16", "plain"),
    ("qwen3-yarn", "bfloat16", "plain"),
    ("qwen3.5", "bfloat16", "plain"),
    ("qwen3.5", "float16", "chunked"),
    ("gemma4_text", "bfloat16", "plain"),  # runs through transformers' model code
]
# Includes every dtype of the first model.
FAST = (0, 4, *range(5, len(CASES) - 1, 4), len(CASES) - 1)
CUDA_CASES = [  # different kernels on CUDA, the same ones on a CPU
    ("wide", "bfloat16", "padded"),
    ("wide", "float16", "alone"),
    ("llama-tied-rope", "float16", "alone"),
    ("gemma2", "bfloat16", "alone"),
    ("gemma3", "bfloat16", "alone"),
    ("qwen3-moe", "bfloat16", "alone"),
    ("olmo2", "bfloat16", "alone"),
]


@cache
def checkpoint(root: Path, name: str) -> TinyCheckpoint:
    config = make_config(name) if name == "gemma4_text" else CONFIGS[name]
    return make_checkpoint(root / f"logits-{name}", config, seed=3)


@cache
def make_sequences(vocab_size: int) -> tuple[Ids, Ids]:
    """Return prompts and their continuations; some prompts share a prefix, two are equal."""
    rng = random.Random(4)
    lens = PROMPT_LENS * 2
    prompts = [rng.choices(range(vocab_size), k=length) for length in lens]
    prompts += [[*prompts[6][:50], 3], prompts[6][:64], prompts[5]]
    return prompts, [rng.choices(range(vocab_size), k=NUM_NEW) for _ in prompts]


@cache
def transformers_logits(root: Path, name: str, device: str, dtype: str) -> tuple[Tensor, Tensor]:
    """Return the exact logits of the rounded weights, and transformers' logits in `dtype`."""
    model, path = checkpoint(root, name).model, checkpoint(root, name).path
    rounded = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=model.config._attn_implementation
    ).to(device)
    exact = copy.deepcopy(model).double().to(device)
    exact.set_experts_implementation("eager")  # other implementations do not support float64
    exact.load_state_dict(rounded.state_dict())
    prompts, answers = make_sequences(rounded.config.vocab_size)
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    with torch.inference_mode(), native_products(device, dtype), exact_delta_rules():
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt + answer[:-1]], device=device)
            for model, logits in zip((exact, rounded), both, strict=True):
                logits.append(model(ids).logits[0, len(prompt) - 1 :].double().cpu())
    return torch.cat(both[0]), torch.cat(both[1])


@contextmanager
def native_products(device: str, dtype: str) -> Iterator[None]:
    """If the CPU emulates a dtype, compute in float32 and round the results, which is faster."""
    linear, attend = F.linear, F.scaled_dot_product_attention
    is_native = getattr(torch, dtype) in find_cpu_features().multiplies

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        wide = x.to(weight.dtype), weight, bias
        return linear(*map(widen, wide)).to(x.dtype)

    def attend_wide(*tensors: Tensor, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else widen(attn_mask)
        return attend(*map(widen, tensors), attn_mask=mask, **more).to(tensors[0].dtype)

    def widen(tensor: Tensor | None) -> Tensor | None:
        is_narrow = tensor is not None and tensor.dtype == getattr(torch, dtype)
        return tensor.float() if is_narrow else tensor

    if device != "cpu" or is_native:
        yield
        return
    with (
        patch.object(F, "linear", multiply),
        patch.object(F, "scaled_dot_product_attention", attend_wide),
    ):
        yield


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "dtype", "mode", "device"),
    [
        *(
            pytest.param(*case, "cpu", marks=() if i in FAST else pytest.mark.slow)
            for i, case in enumerate(CASES)
        ),
        *(pytest.param(*case, "cuda", marks=NEEDS_GPU) for case in CASES + CUDA_CASES),
    ],
)
def test_as_exact_as_transformers(
    checkpoint_root: Path, name: str, dtype: str, mode: str, device: str
) -> None:
    exact, theirs = transformers_logits(checkpoint_root, name, device, dtype)
    prompts, answers = make_sequences(exact.shape[1])
    options = {"max_model_len": 160, "max_num_seqs": 8, "kvcache_block_size": 16, **MODES[mode]}
    path = checkpoint(checkpoint_root, name).path
    with LLM(
        path,
        dtype=dtype,
        device=device,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.2,
        **options,
    ) as llm:
        for _ in range(2):  # the second time, every prompt is cached
            ours = torch.cat(forced_logits(llm, prompts, answers))
            errors = [most_rows(logits - exact, name) for logits in (ours, theirs)]
            assert_as_exact(*errors, FACTORS[dtype])


def most_rows(errors: Tensor, name: str) -> Tensor:
    """For models with experts, omit the worst rows: near a tie, rounding selects another expert."""
    if name not in ("mixtral", "qwen3-moe", "qwen3.5-moe", "qwen3-next"):
        return errors
    order = errors.square().mean(1).argsort()
    return errors[order[: len(order) * 15 // 16]]


def assert_as_exact(ours: Tensor, theirs: Tensor, factor: float) -> None:
    """Compare the RMS error and the largest error."""
    assert ours.isfinite().all()
    assert ours.square().mean().sqrt() <= factor * theirs.square().mean().sqrt()
    assert ours.abs().max() <= 2 * factor * theirs.abs().max()
