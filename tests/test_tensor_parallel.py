"""Several workers generate the same tokens as one: every family, float32, gloo, one process."""

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
from nanovllm.features.states.state_pool import StatePool
from nanovllm.worker import worker
from tests.checkpoints import (
    FAMILIES,
    SIZES,
    VARIANTS,
    VOCAB_SIZE,
    TinyCheckpoint,
    make_checkpoint,
    shared_checkpoint,
)
from tests.clear_choices import assert_clear
from tests.threaded_ranks import ThreadedExecutor, engines_of

pytestmark = pytest.mark.usefixtures("one_thread")

ODD_SIZES = {**SIZES, "vocab_size": VOCAB_SIZE - 3, "initializer_range": 0.3}
# SmolLM2 has nine heads and three KV heads.
NINE = {"hidden_size": 72, "intermediate_size": 81, "num_attention_heads": 9}
# Vocabulary sizes that 2 and 4 do not divide; the second leaves few tokens for the last rank.
ODD: dict[str, PreTrainedConfig] = {
    "odd-vocabulary": LlamaConfig(**ODD_SIZES, tie_word_embeddings=False),
    "nine-heads": LlamaConfig(**{**ODD_SIZES, **NINE, "num_key_value_heads": 3}),
    "odd-tied": LlamaConfig(**{**ODD_SIZES, "vocab_size": 149}, tie_word_embeddings=True),
}
# RoPE is the same on every rank, so the variants of Llama that differ in nothing else are left out.
SAME_SHARDS = ("llama-linear", "llama-dynamic", "mistral-whole", "qwen3-yarn")
# Four ranks replicate KV heads, or give a rank few experts, heads of states or tokens.
FOUR = ("qwen3-tied", "qwen2-window", "qwen3-moe", "qwen3.5", "qwen3-next", "gemma3-six", "olmo3")
NUM_RANKS = {**dict.fromkeys((*FOUR, "odd-vocabulary"), 4), "nine-heads": 3}  # others have 2
NAMES = [name for name in VARIANTS | FAMILIES | ODD if name not in SAME_SHARDS]
LARGEST_ID = 140
OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 6,
    "max_model_len": 96,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}
# All at once: chunked prompts, preempted and resumed sequences, cached prefixes.
CROWDED = {"max_num_batched_tokens": 50, "num_kvcache_blocks": 6}


def make_prompts() -> list[list[int]]:
    """Return prompts that soon need a second block, and prompts that share a prefix."""
    rng = random.Random(5)
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
def checkpoint(root: Path, name: str) -> TinyCheckpoint:
    return make_checkpoint(root / name, ODD[name]) if name in ODD else shared_checkpoint(root, name)


def generate(path: Path, num_rounds: int = 1, **options: Any) -> list[list[int]]:
    with LLM(path, **{**OPTIONS, **options}) as llm:
        return complete(llm, num_rounds, **options)


def complete(llm: LLM, num_rounds: int = 1, **options: Any) -> list[list[int]]:
    """Complete all prompts in each round; later rounds use the prefix cache, if enabled."""
    outputs = [
        output
        for _ in range(num_rounds)
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    ]
    scheduler = llm.engine.core.scheduler
    scheduler.check()
    if "num_kvcache_blocks" in options:
        assert scheduler.num_preemptions > 0
    has_states = any(isinstance(each, StatePool) for each in scheduler.features)
    # So few blocks leave hybrid models few snapshots, which may all be evicted before a hit.
    if options.get("enable_prefix_caching", True) and not has_states:
        assert any(output.num_cached_tokens for output in outputs)
    return [output.token_ids for output in outputs]


@cache
def one_worker(root: Path, name: str) -> list[list[int]]:
    """Return one worker's tokens; assert that rounding on several ranks cannot change them."""
    answers = generate(checkpoint(root, name).path)
    assert len({tuple(answer) for answer in answers}) > len(PROMPTS) - 2
    for prompt, answer, params in zip(PROMPTS, answers, PARAMS, strict=True):
        assert_clear(checkpoint(root, name), prompt, answer, params)
    return answers


@pytest.mark.parametrize(("depth", "name"), [(i % 2, name) for i, name in enumerate(NAMES)])
def test_every_family(checkpoint_root: Path, name: str, depth: int) -> None:
    check(checkpoint_root, name, size=NUM_RANKS.get(name, 2), depth=depth, **CROWDED)


def check(checkpoint_root: Path, name: str, size: int, num_rounds: int = 1, **options: Any) -> None:
    want = one_worker(checkpoint_root, name) * num_rounds
    with engines_of(size):
        assert generate(checkpoint(checkpoint_root, name).path, num_rounds, **options) == want


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-cache": {"enable_prefix_caching": False},
    "preempted-chunked": {"num_kvcache_blocks": 6, "max_num_batched_tokens": 20},
    "eager": {"enforce_eager": True},
    "plain-torch": {"attention_backend": "sdpa"},
}


@pytest.mark.parametrize("mode", list(MODES))
def test_modes(checkpoint_root: Path, mode: str) -> None:
    check(checkpoint_root, "qwen3", size=2, num_rounds=2, depth=1, **MODES[mode])


@pytest.mark.parametrize("depth", [0, 1])
def test_aborts_leave_the_others_alone(checkpoint_root: Path, depth: int) -> None:
    """Aborted requests write blocks that others share, sometimes only in part."""
    path, rng = checkpoint(checkpoint_root, "qwen3").path, random.Random(0)
    doomed, ids, aborted = [], [], []
    outputs: dict[int, list[int]] = {}
    with engines_of(2), LLM(path, **OPTIONS, **CROWDED, depth=depth) as llm:
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            doomed.append(llm.add_request(prompt, params))
            ids.append(llm.add_request(prompt, params))
        while not llm.is_finished():
            if doomed and rng.random() < 0.6:
                aborted.append(llm.abort(doomed.pop(rng.randrange(min(4, len(doomed))))))
            outputs.update((output.seq_id, output.token_ids) for output in llm.step().finished)
        llm.engine.core.scheduler.check()
    num_begun = sum(bool(output and output.token_ids) for output in aborted)
    assert 0 < num_begun < len(aborted)
    assert [outputs[seq_id] for seq_id in ids] == one_worker(checkpoint_root, "qwen3")


def test_a_group_of_one(checkpoint_root: Path) -> None:
    """The rank communicates with itself, as a CUDA graph with NCCL does on one device."""
    check(checkpoint_root, "gemma3", size=1)


@pytest.mark.parametrize("name", ["qwen3-moe", "odd-tied"])
def test_random_weights_are_those_of_one_worker(checkpoint_root: Path, name: str) -> None:
    path = checkpoint(checkpoint_root, name).path
    want = generate(path, load_format="dummy")
    with engines_of(2):
        assert generate(path, load_format="dummy") == want


def test_the_smallest_pool_wins(checkpoint_root: Path) -> None:
    path = checkpoint(checkpoint_root, "qwen3").path
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
    path = checkpoint(checkpoint_root, "llama").path
    with pytest.raises(ConfigError, match="num_attention_heads=4"):
        LLM(path, tensor_parallel_size=3, **OPTIONS)
