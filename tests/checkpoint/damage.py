"""Helpers for damaged checkpoints: odd values, and everything that loading does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")


from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.checkpoint.find import eos_token_ids, find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import EngineConfig
from nanovllm.errors import NanovllmError
from nanovllm.layers.build import BuildContext
from nanovllm.models.registry import build_model, read_config
from nanovllm.ops.torch_ops import TorchOps
from nanovllm.worker.check_model import check_model
from nanovllm.worker.loader import load_weights
from tests.checkpoint.tiny_gguf import HEAD_DIM, VOCAB, write_gguf
from tests.devices import cpu_device

MAX_SECONDS = 5.0  # CPU time; most take milliseconds, imports take seconds
LETTERS = [chr(ord("a") + i) for i in range(20)]
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS, *map("".join, pairwise(LETTERS))]
TOKENS += [f"<{i}>" for i in range(VOCAB - len(TOKENS))]
VOCABULARIES: dict[str, dict[str, Any]] = {
    "llama": {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [float(-i) for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (VOCAB - 3),
        "tokenizer.ggml.unknown_token_id": 0,
    },
    "qwen3moe": {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": list(map(" ".join, pairwise(LETTERS))),
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (VOCAB - 3),
    },
}
ODD: list[Any] = [0, -1, 1, 7, 2.5, 1e308, float("nan"), float("inf"), "3", "", [], {}, [None]]
ODD += [True, False, 10**6, 4 * 10**8, 2**63, 10**30, [["x"]], {"a": 1}, {"rope_type": "yarn"}]


@contextmanager
def outcome(outcomes: Counter[str]) -> Iterator[None]:
    """Count a typed error or a success; any other error, or taking too long, fails the test."""
    start = time.process_time()
    try:
        yield
        outcomes["loaded"] += 1
    except NanovllmError as error:
        outcomes[type(error).__name__] += 1
    assert time.process_time() - start < MAX_SECONDS


def load(path: Path, *, has_tokenizer: bool = False) -> None:
    """Do everything that an engine does with a checkpoint before it runs."""
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = EngineConfig(str(path), **sizes, dtype="float32", device="cpu")  # type: ignore[arg-type]
    checkpoint = find_checkpoint(str(path), check=partial(check_model, config, cpu_device()))
    eos_token_ids(checkpoint)
    if has_tokenizer:
        load_tokenizer(checkpoint)
    build = BuildContext(torch.device("cpu"), torch.float32, SdpaAttention(16), TorchOps())
    with torch.inference_mode():
        model = build_model(read_config(checkpoint.config), 64, build)
        load_weights(model, checkpoint, cpu_device(), show_progress=False)


def write_gguf_files(folder: Path) -> list[Path]:
    """Return complete checkpoints, with tokenizers."""
    folder.mkdir(exist_ok=True)
    raw = {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    return [
        write_gguf(folder / f"{arch}.gguf", arch, metadata=vocabulary, raw=raw)
        for arch, vocabulary in VOCABULARIES.items()
    ]
