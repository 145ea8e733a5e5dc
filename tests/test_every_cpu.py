"""Engines give correct outputs with the kernels and dtypes chosen for every kind of CPU."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cpu.ops import NumbaOps
from nanovllm.ops.torch_ops import TorchOps
from tests.checkpoints import VOCAB_SIZE, TinyCheckpoint
from tests.cpus import BF16, CPUS, FP32, Products, cpu
from tests.forced_tokens import forced_logits
from tests.test_logits import (
    FACTORS,
    assert_as_exact,
    checkpoint,
    make_sequences,
    most_rows,
    transformers_logits,
)

__all__ = ["cpu"]
pytestmark = pytest.mark.usefixtures("one_thread")
Tiny = Callable[[str], TinyCheckpoint]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "kvcache_block_size": 16,
    "max_model_len": 160,
    "max_num_seqs": 24,  # more rows than our matmul kernel supports
}
# Matmuls of many rows in bfloat16 and float32; the dtype that "auto" chooses for 16-bit weights.
CHOICES = {
    "amx": ("packed bfloat16", "packed float32", BF16),
    "avx512": ("rows float32", "packed float32", BF16),
    "avx2": ("rows float32", "packed float32", BF16),
    "arm-bf16": ("rows bfloat16", "packed float32", BF16),
    "arm": ("rows float32", "packed float32", BF16),
    "no-onednn": ("rows float32", "rows float32", BF16),
    "no-numba": ("rows float32", "rows float32", FP32),
}


@pytest.mark.parametrize("name", list(CPUS))
def test_products_and_dtypes_are_chosen_by_the_record(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products, features = Products(monkeypatch), CPUS[name]
    for dtype, choice in zip((BF16, FP32), CHOICES[name][:2], strict=True):
        ops = CpuDevice(EngineConfig("none"), features=features).ops(dtype)
        assert isinstance(ops, NumbaOps if features.has_compiler else TorchOps)
        weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((7, 9), (7,), (40, 9)))
        y = ops.pack_linear(weight, bias, None, True)(x)
        want = torch.addmm(bias.double(), x.double(), weight.double().T)
        torch.testing.assert_close(y.double(), want, rtol=1e-2, atol=1e-2)
        assert products.noted == {choice}
        products.noted.clear()
        ops.pack_linear(weight, bias, None, False)(x)  # there is no room for a second copy
        assert products.noted == {choice.replace("packed", "rows")}
        products.noted.clear()
    for stored in ("bfloat16", "float16"):
        assert features.choose_dtype(stored, is_quantized=False) == CHOICES[name][2]
    assert features.choose_dtype("float32", is_quantized=False) == FP32


@pytest.mark.parametrize("variant", ["llama-mha-bias", "qwen3-moe"])
def test_tokens_equal_those_of_transformers(
    tiny: Tiny, variant: str, cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Products(monkeypatch)
    rng = random.Random(6)
    prompts = [rng.choices(range(VOCAB_SIZE), k=length) for length in (1, 40, 17, 90)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(tiny(variant).path, dtype="float32", **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    want = tiny(variant).answers(prompts, 6)
    assert [output.token_ids for output in outputs] == want


@pytest.mark.parametrize("variant", ["llama-mha-bias", "qwen3-moe"])
def test_logits_in_bfloat16_are_as_exact_as_those_of_transformers(
    checkpoint_root: Path, variant: str, cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, theirs = transformers_logits(checkpoint_root, variant, "cpu", "bfloat16")
    prompts, answers = make_sequences(exact.shape[1])
    products = Products(monkeypatch)
    with warnings.catch_warnings():
        if BF16 not in CPUS[cpu].multiplies:
            warnings.simplefilter("error")  # torch warns about emulated dtypes
        path = checkpoint(checkpoint_root, variant).path
        with LLM(path, dtype="bfloat16", **OPTIONS) as llm:
            ours = torch.cat(forced_logits(llm, prompts, answers))
    assert_as_exact(
        *(most_rows(logits - exact, variant) for logits in (ours, theirs)), FACTORS["bfloat16"]
    )
    assert CHOICES[cpu][0] in products.noted


def test_float16_works_where_nothing_multiplies_it(checkpoint_root: Path, cpu: str) -> None:
    exact, theirs = transformers_logits(checkpoint_root, "llama-mha-bias", "cpu", "float16")
    prompts, answers = make_sequences(exact.shape[1])
    path = checkpoint(checkpoint_root, "llama-mha-bias").path
    with LLM(path, dtype="float16", **OPTIONS) as llm:
        ours = torch.cat(forced_logits(llm, prompts, answers))
    assert_as_exact(ours - exact, theirs - exact, FACTORS["float16"])
