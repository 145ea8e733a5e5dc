"""Fixtures for the programs in learn/, which import each other by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.engines import load_transformers
from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from tests.checkpoints import MIN_GAP, SIZES, TinyCheckpoint, make_checkpoint

LEARN = Path(__file__).parents[2] / "learn"
sys.path[:0] = [str(LEARN), str(LEARN / "solutions")]

from common import Model, load_model  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Run every test on one thread, which is faster than two on busy cores."""


@pytest.fixture(scope="session")
def smollm2() -> tuple[Model, Any]:
    """The model and the tokenizer that every program loads by default."""
    return load_model("smollm2"), load_tokenizer(find_checkpoint("smollm2"))


@pytest.fixture
def run_program(
    smollm2: tuple[Model, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Return a function that runs a program with other constants and returns what it prints."""

    def run(program: Any, **constants: Any) -> str:
        for name, value in constants.items():
            monkeypatch.setattr(program, name, value)
        program.main(*smollm2)
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="session")
def tiny_llama(tiny: Callable[[str], TinyCheckpoint]) -> Model:
    return load_model(str(tiny("llama").path))


@pytest.fixture(scope="session")
def tiny_folder(checkpoint_root: Path) -> Path:
    """A folder for `--model`: a tiny random model with SmolLM2's tokenizer."""
    tokenizer = load_tokenizer(find_checkpoint("smollm2"))
    config = LlamaConfig(**{**SIZES, "vocab_size": len(tokenizer)}, tie_word_embeddings=True)
    folder = make_checkpoint(checkpoint_root / "learn-llama", config).path
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def assert_greedy() -> Callable[[Sequence[int], Sequence[int]], None]:
    """Return a function that compares an output of SmolLM2 with transformers token for token."""
    model = load_transformers("smollm2", "cpu", "float32")

    def check(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        # One pass verifies greedy decoding: each token is the argmax after its predecessors.
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt_ids, *output_ids]])).logits[0]
        top2 = logits[len(prompt_ids) - 1 : -1].topk(2)
        assert (top2.values[:, 0] - top2.values[:, 1]).min() > MIN_GAP
        assert top2.indices[:, 0].tolist() == list(output_ids)

    return check
