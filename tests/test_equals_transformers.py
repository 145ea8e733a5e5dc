"""Token-for-token equality with transformers: greedy, float32, CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from nanovllm import LLM, SamplingParams
from tests.checkpoints import FAMILIES, VARIANTS, VOCAB_SIZE, TinyCheckpoint

# Lengths around the boundaries of 16-token blocks.
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49)
pytestmark = pytest.mark.usefixtures("one_thread")  # tests/worker covers several threads
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
HYBRID = ("qwen3.5", "qwen3-next")


def make_prompts() -> list[list[int]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in BORDERS]
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts += [shared[:32], shared[:33], shared, [*shared, 5], [*shared, 5, 6, 7]]
    return [*prompts, prompts[3], prompts[5], shared]  # duplicates in one batch


MODES = {
    "plain": {},
    "no-cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 7},
    "chunked-no-cache": {"max_num_batched_tokens": 13, "enable_prefix_caching": False},
    "preempted": {"num_kvcache_blocks": 6},
    "preempted-chunked": {"num_kvcache_blocks": 7, "max_num_batched_tokens": 9},
    "few-slots": {"max_num_seqs": 3},
    "block-32": {"kvcache_block_size": 32},
    "block-48": {"kvcache_block_size": 48, "max_num_batched_tokens": 10},
    "block-256": {"kvcache_block_size": 256},
    "eager": {"enforce_eager": True},
    "many-rows": {"max_num_seqs": 20},  # more rows than a captured step supports
}


# With depths. Hybrid models run in two of them, others in one; tests/test_tensor_parallel.py runs
# most families plain, and preempted with chunks.
FAMILY_MODES = [("plain", 0), ("preempted-chunked", 1), ("eager", 0), ("many-rows", 1)]


def variant_cases() -> Iterator[tuple[str, str, int]]:
    """Distribute all pairs of a mode and a depth over the variants."""
    variants = list(VARIANTS)
    for number, (depth, mode) in enumerate(itertools.product((0, 1), MODES)):
        yield variants[number % len(variants)], mode, depth


def family_cases() -> Iterator[tuple[str, str, int]]:
    for number, family in enumerate(FAMILIES):
        num_modes = 2 if family.startswith(HYBRID) else 1
        for index in range(num_modes):
            yield family, *FAMILY_MODES[(number + index) % len(FAMILY_MODES)]


@pytest.mark.parametrize(("name", "mode", "depth"), [*variant_cases(), *family_cases()])
def test_equals_transformers(
    tiny: Callable[[str], TinyCheckpoint], name: str, mode: str, depth: int
) -> None:
    check(tiny(name), mode, depth)


def check(checkpoint: TinyCheckpoint, mode: str, depth: int) -> None:
    prompts = make_prompts()
    options = {"kvcache_block_size": 16, "max_num_seqs": 8, "max_model_len": 128, **MODES[mode]}
    with LLM(checkpoint.path, skip_tokenizer_init=True, depth=depth, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        tokens = [output.token_ids for output in outputs]
        assert sum(len(set(each)) for each in tokens) > 5 * len(tokens), "repetition proves little"
        checkpoint.assert_greedy(prompts, tokens)
        outputs = llm.generate(prompts, replace(GREEDY, max_tokens=5), use_tqdm=False)
        assert [output.token_ids for output in outputs] == [each[:5] for each in tokens]
        scheduler = llm.engine.core.scheduler
        scheduler.check()
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
        if mode.startswith("preempted"):
            assert scheduler.num_preemptions > 0
        if mode == "plain":
            assert sum(output.num_cached_tokens for output in outputs) > 300
        if "no-cache" in mode:
            assert not any(output.num_cached_tokens for output in outputs)
