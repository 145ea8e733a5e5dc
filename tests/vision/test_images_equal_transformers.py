"""Prompts with images: token-for-token equality with transformers, greedy, float32, CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from nanovllm import LLM, SamplingParams
from tests.threaded_ranks import engines_of
from tests.vision.tiny_vision import LARGEST_ID, Prompt, as_input, noise, tiny_vision

pytestmark = pytest.mark.usefixtures("one_thread")
MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 6,
    "max_model_len": 160,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}
WIDE, TALL, SMALL, SQUARE = noise(1, 90, 20), noise(2, 17, 60), noise(3, 8, 5), noise(4, 32, 32)
OTHER = noise(5, 32, 32)  # as many tokens as SQUARE


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(LARGEST_ID) for _ in range(length)]


def make_prompts() -> list[Prompt]:
    """Return prompts with 0 to 4 images; many share a prefix, which ends before or in an image."""
    before, after = text(1, 21), text(2, 4)
    return [
        [*before, *after],
        [*before, SQUARE, *after],
        [*before, OTHER, *after],
        [*before, SQUARE, OTHER, *after],
        [*before, OTHER, SQUARE, *after],
        [*before, SQUARE, *after, WIDE],
        [WIDE, *after],
        [*text(3, 3), TALL, *text(4, 5), SMALL, *text(5, 17), WIDE, 7],
        [TALL, SQUARE, SQUARE, SMALL, 5],
        text(6, 40),
        [*before, SQUARE, *after],  # twice in a batch
    ]


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-cache": {"enable_prefix_caching": False},
    "one-token-chunks": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 7, "depth": 1},
    "chunked-no-cache": {"max_num_batched_tokens": 13, "enable_prefix_caching": False},
    "preempted": {"num_kvcache_blocks": 9, "depth": 1},
    "preempted-chunked": {"num_kvcache_blocks": 9, "max_num_batched_tokens": 11},
    "eager": {"enforce_eager": True, "depth": 1},
    "plain-torch": {"attention_backend": "sdpa"},
    "two-ranks": {"tensor_parallel_size": 2, "depth": 1},
    "two-ranks-crowded": {
        "tensor_parallel_size": 2,
        "num_kvcache_blocks": 9,
        "max_num_batched_tokens": 20,
    },
}


@pytest.mark.parametrize(("index", "mode"), list(enumerate(MODES)))
def test_equals_transformers(checkpoint_root: Path, index: int, mode: str) -> None:
    """A second round hits cached prefixes; each mode runs one of the models."""
    options = {**OPTIONS, **MODES[mode]}
    check(checkpoint_root, ("dense", "moe")[index % 2], options)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_models(checkpoint_root: Path, name: str) -> None:
    check(checkpoint_root, name, {**OPTIONS, "max_num_batched_tokens": 50})


def check(root: Path, name: str, options: dict[str, Any]) -> None:
    checkpoint, prompts = tiny_vision(root, name), make_prompts()
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]
    assert len(set(map(tuple, want))) == len(want) - 1, "the images hardly matter"
    inputs = [as_input(prompt) for prompt in prompts]
    ranks = options.pop("tensor_parallel_size", 1)
    with engines_of(ranks), LLM(checkpoint.path, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(inputs, GREEDY, use_tqdm=False)
            assert [output.token_ids for output in outputs] == want
        scheduler = llm.engine.core.scheduler
        scheduler.check()
        if "num_kvcache_blocks" in options:
            assert scheduler.num_preemptions > 0
        elif options.get("enable_prefix_caching", True):
            assert sum(output.num_cached_tokens for output in outputs) > 100


def test_every_chunk_size(checkpoint_root: Path) -> None:
    """Chunks begin and end everywhere in texts and images."""
    checkpoint = tiny_vision(checkpoint_root, "dense")
    prompt: Prompt = [*text(1, 3), SQUARE, *text(2, 4), WIDE, *text(3, 2)]
    want = checkpoint.generate(prompt, MAX_TOKENS)
    with LLM(checkpoint.path, **OPTIONS) as llm:
        for size in range(1, 62):
            llm.engine.core.scheduler.max_num_batched_tokens = size
            item = as_input(prompt, cache_salt=f"{size}")
            [output] = llm.generate(item, GREEDY, use_tqdm=False)
            assert output.token_ids == want, size
            assert output.num_cached_tokens == 0


def test_every_hit_length(checkpoint_root: Path) -> None:
    """Cached prefixes end before an image, and behind each of its tokens."""
    checkpoint = tiny_vision(checkpoint_root, "moe")
    ends = set()
    with LLM(checkpoint.path, **OPTIONS) as llm:
        for length in range(10, 27):
            lead = text(length, length)
            one_token = replace(GREEDY, max_tokens=1)
            llm.generate(as_input([*lead, SQUARE]), one_token, use_tqdm=False)
            for image in (SQUARE, OTHER):
                prompt: Prompt = [*lead, image, 5, 6]
                [output] = llm.generate(as_input(prompt), GREEDY, use_tqdm=False)
                assert output.token_ids == checkpoint.generate(prompt, MAX_TOKENS)
                ends.add(output.num_cached_tokens - length - 1)
    assert ends >= set(range(1, 16)), "hits that end in the image"
    assert min(ends) < 0


def test_a_picture_after_cached_text(checkpoint_root: Path) -> None:
    """The image is not skipped although all text before it, and after it, is cached."""
    checkpoint = tiny_vision(checkpoint_root, "dense")
    before, after = text(1, 32), text(2, 16)
    prompts: list[Prompt] = [[*before, *after], [*before, SQUARE, *after], [*before, *after]]
    prompts += [[*before, OTHER, *after], [*before, SQUARE, *after]]
    with LLM(checkpoint.path, **OPTIONS) as llm:
        for prompt in prompts:
            [output] = llm.generate(as_input(prompt), GREEDY, use_tqdm=False)
            assert output.token_ids == checkpoint.generate(prompt, MAX_TOKENS)
        assert output.num_cached_tokens >= 48


def test_together_and_one_after_another(checkpoint_root: Path) -> None:
    """Four requests that differ only in their images get the answers for their own."""
    checkpoint = tiny_vision(checkpoint_root, "dense")
    prompts: list[Prompt] = [[*text(1, 5), noise(i, 30, 30), *text(2, 5)] for i in range(4)]
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]
    inputs = [as_input(prompt) for prompt in prompts]
    with LLM(checkpoint.path, **OPTIONS) as llm:
        outputs = llm.generate(inputs, GREEDY, use_tqdm=False)
        assert [output.token_ids for output in outputs] == want
    with LLM(checkpoint.path, **OPTIONS) as llm:
        outputs = [llm.generate(each, GREEDY, use_tqdm=False)[0] for each in inputs]
        assert [output.token_ids for output in outputs] == want


def test_an_image_is_encoded_once(checkpoint_root: Path) -> None:
    checkpoint = tiny_vision(checkpoint_root, "dense")
    prompts: list[Prompt] = [[*text(i, 20), SQUARE.copy(), *text(i, 5), SQUARE] for i in range(3)]
    with LLM(checkpoint.path, **OPTIONS, max_num_batched_tokens=9) as llm:
        [inputs] = llm.engine.core.executor.parts
        outputs = llm.generate(list(map(as_input, prompts)), GREEDY, use_tqdm=False)
        assert inputs.cache.num_encoded == 1
        want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]
        assert [output.token_ids for output in outputs] == want


def test_evicted_embeddings_are_computed_again(checkpoint_root: Path) -> None:
    checkpoint = tiny_vision(checkpoint_root, "dense")
    prompt: Prompt = [*text(1, 20), SQUARE, 7, OTHER, 5]
    with LLM(checkpoint.path, **OPTIONS, max_num_batched_tokens=9) as llm:
        [inputs] = llm.engine.core.executor.parts
        inputs.cache.max_bytes = 1
        want = checkpoint.generate(prompt, MAX_TOKENS)
        for salt in ("a", "b", "c"):
            [output] = llm.generate(as_input(prompt, cache_salt=salt), GREEDY, use_tqdm=False)
            assert output.token_ids == want
        assert inputs.cache.num_encoded >= 6


def test_an_image_larger_than_the_cache_is_encoded_once(checkpoint_root: Path) -> None:
    """Not with every chunk."""
    checkpoint = tiny_vision(checkpoint_root, "dense")
    prompt: Prompt = [*text(1, 20), SQUARE, 7]
    with LLM(checkpoint.path, **OPTIONS, max_num_batched_tokens=9) as llm:
        [inputs] = llm.engine.core.executor.parts
        inputs.cache.max_bytes = 1
        [output] = llm.generate(as_input(prompt), GREEDY, use_tqdm=False)
        assert inputs.cache.num_encoded == 1
    assert output.token_ids == checkpoint.generate(prompt, MAX_TOKENS)


def test_random_weights(checkpoint_root: Path) -> None:
    checkpoint = tiny_vision(checkpoint_root, "dense")
    with LLM(checkpoint.path, **OPTIONS, load_format="dummy") as llm:
        [output] = llm.generate(as_input([5, SQUARE]), GREEDY, use_tqdm=False)
        assert len(output.token_ids) == MAX_TOKENS
