"""Several workers give token for token what one gives: every family, float32, gloo, one process."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import LlamaConfig, PreTrainedConfig

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.worker import worker
from tests.checkpoints import FAMILIES, SIZES, VARIANTS, VOCAB_SIZE, make_checkpoint
from tests.threaded_ranks import ThreadedExecutor, engines_of

pytestmark = pytest.mark.usefixtures("one_thread")

ODD_SIZES = {**SIZES, "vocab_size": VOCAB_SIZE - 3, "initializer_range": 0.3}
# Vocabularies that divide by neither number of ranks, the second with few tokens for the last.
ODD: dict[str, PreTrainedConfig] = {
    "odd-vocabulary": LlamaConfig(**ODD_SIZES, tie_word_embeddings=False),
    "odd-tied": LlamaConfig(**{**ODD_SIZES, "vocab_size": 149}, tie_word_embeddings=True),
}
CONFIGS = VARIANTS | FAMILIES | ODD
LARGEST_ID = 140
OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 6,
    "max_model_len": 96,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}
# All at once: prompts in chunks, sequences preempted and resumed, prefixes found in the cache.
CROWDED = {"max_num_batched_tokens": 50, "num_kvcache_blocks": 6}


def make_prompts() -> list[list[int]]:
    """The first ones fill a block each and soon want a second; the others begin alike."""
    rng = random.Random(3)
    lens = (15, 14, 15, 1, 15, 16)
    prompts = [[rng.randrange(LARGEST_ID) for _ in range(length)] for length in lens]
    shared = [rng.randrange(LARGEST_ID) for _ in range(40)]
    return [*prompts, shared[:33], shared, [*shared, 5]]


PROMPTS = make_prompts()
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": list(range(0, LARGEST_ID, 3))},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
]
PARAMS = [
    SamplingParams(**KINDS[i % len(KINDS)], seed=i, max_tokens=9 - i // 2, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@cache
def checkpoint(root: Path, name: str) -> Path:
    return make_checkpoint(root / f"ranks-{name}", CONFIGS[name]).path


def generate(path: Path, **options: Any) -> list[list[int]]:
    """Answer every prompt twice: the second time all of them are cached, if they may be."""
    with LLM(path, **{**OPTIONS, **options}) as llm:
        answers = [
            output.token_ids
            for _ in range(2)
            for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        ]
        scheduler = llm.engine.core.scheduler
        scheduler.check()
        if "num_kvcache_blocks" in options:
            assert scheduler.num_preemptions > 0
    return answers


@cache
def one_worker(path: Path) -> list[list[int]]:
    answers = generate(path)
    assert len({tuple(answer) for answer in answers}) > len(PROMPTS) - 2
    return answers


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_family(checkpoint_root: Path, name: str) -> None:
    check(checkpoint_root, name, size=2, depth=0, **CROWDED)


# Two kv heads, four, one; experts; packed weights; biases; a head that is the embedding.
@pytest.mark.parametrize(
    "name", ["qwen2", "llama-mha-bias", "gemma3-six", "qwen3-moe", "phi3", "odd-tied"]
)
def test_more_ranks(checkpoint_root: Path, name: str) -> None:
    check(checkpoint_root, name, size=4, depth=1, **CROWDED)


def check(checkpoint_root: Path, name: str, size: int, **options: Any) -> None:
    path = checkpoint(checkpoint_root, name)
    with engines_of(size):
        assert generate(path, **options) == one_worker(path)


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 13},
    "preempted-chunked": {"num_kvcache_blocks": 6, "max_num_batched_tokens": 20},
    "eager": {"enforce_eager": True},
    "plain-torch": {"attention_backend": "sdpa"},
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("mode", "depth"), [("plain", 1), ("no-cache", 0), ("chunked", 1), ("preempted-chunked", 0)]
)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_mode(checkpoint_root: Path, name: str, mode: str, depth: int, size: int) -> None:
    check(checkpoint_root, name, size, depth=depth, **MODES[mode])


@pytest.mark.parametrize("mode", list(MODES))
def test_modes(checkpoint_root: Path, mode: str) -> None:
    check(checkpoint_root, "qwen3", size=2, depth=1, **MODES[mode])


def test_a_group_of_one(checkpoint_root: Path) -> None:
    """It talks to itself, as a CUDA graph with NCCL in it does on one device."""
    check(checkpoint_root, "gemma3", size=1)


@pytest.mark.parametrize("name", ["qwen3-moe", "odd-tied"])
def test_random_weights_are_those_of_one_worker(checkpoint_root: Path, name: str) -> None:
    path = checkpoint(checkpoint_root, name)
    want = generate(path, load_format="dummy")
    with engines_of(2):
        assert generate(path, load_format="dummy") == want


def test_the_smallest_pool_wins(checkpoint_root: Path) -> None:
    path = checkpoint(checkpoint_root, "qwen3")
    with (
        engines_of(2),
        mock.patch.object(worker, "choose_num_blocks", side_effect=[30, 20]),
        LLM(path, **OPTIONS) as llm,
    ):
        assert llm.engine.info.num_blocks == 20
        executor: Any = llm.engine.core.executor
        assert isinstance(executor, ThreadedExecutor)
        for rank in executor.workers:
            assert rank.runner.forward.caches[0].k.shape[:3] == (20, 16, 1)


def test_what_cannot_be_split_is_refused(checkpoint_root: Path) -> None:
    path = checkpoint(checkpoint_root, "llama")
    with pytest.raises(ConfigError, match="num_attention_heads=4"):
        LLM(path, tensor_parallel_size=3, **OPTIONS)
